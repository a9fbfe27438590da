"""The command with which further peers join a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config.configuration import Configuration
from diloco.config.run_plan import join_command
from diloco.train.settings import CheckpointSettings
from diloco.transport.hivemind.settings import SwarmSettings

TYPED = (
    ("train --transport hivemind --run a", "diloco train --transport hivemind --run a --join"),
    ("train --run a --out runs/x --steps 5", "diloco train --run a --steps 5 --join"),
    ("train -o runs/x --run=a --swarm.join=/ip4/1 --steps 5", "diloco train --run=a --steps 5 --join"),
    ("finetune --out x llama --data c --join /a /b --swarm.listen /c /d", "diloco finetune llama --data c --join"),
    ("train --replica 2 run.toml --swarm.identity key --swarm.announce /a", "diloco train run.toml --join"),
)


@pytest.mark.parametrize(("typed", "told"), TYPED)
def test_others_are_told_what_was_typed_without_what_is_about_this_peer(typed: str, told: str) -> None:
    assert " ".join(join_command(typed.split(), Configuration())) == told


def test_others_are_told_the_name_of_a_run_that_goes_on() -> None:
    going_on = Configuration(checkpoint=CheckpointSettings(resume=Path("x")), swarm=SwarmSettings(run="a"))
    told = join_command(["train", "--resume", "x"], going_on)
    assert " ".join(told) == "diloco train --transport hivemind --run a --join"
