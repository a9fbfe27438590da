"""Samples during training: when they are drawn and from which prompts, without an effect on training."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.events import SampleGenerated
from tests.runs import Listener, train, write_text

EVERY = " --evaluation.sample-every-steps"


@pytest.mark.parametrize("algorithm", ["streaming", "none"])
def test_samples_are_drawn_when_due_and_leave_every_bit_of_training(tmp_path: Path, algorithm: str) -> None:
    data, listener = write_text(tmp_path), Listener()
    flags = "" if algorithm == "streaming" else "--algorithm none --fragments 1 --overlap-steps 0"
    without = train(data, tmp_path / "without", flags)
    prompts = ["--evaluation.sample-prompts", "alpha", "beta"]
    drawn = train(data, tmp_path / "with", " ".join([flags, EVERY, "5", *prompts]), sink=listener)
    for key in ("global_params_digest", "heldout_loss"):
        assert drawn[key] == without[key]
    samples = listener.of(SampleGenerated)
    assert [(sample.step, sample.prompt, sample.final) for sample in samples] == [
        (5, "alpha", False), (5, "beta", False), (10, "alpha", False), (10, "beta", False),
        (12, "alpha", True), (12, "beta", True),
    ]  # fmt: skip
    assert all(sample.text for sample in samples)
    if algorithm == "none":
        return
    # drawn with the same seed: only the model differs between two steps
    again = Listener()
    train(data, tmp_path / "again", " ".join([flags, EVERY, "10", *prompts]), sink=again)
    assert [sample.text for sample in again.of(SampleGenerated)] == [sample.text for sample in samples[2:]]


def test_none_are_drawn_where_they_have_no_length_or_the_run_was_stopped(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    for flags, steps in (("", []), (f"{EVERY} 4 --stop-after 6", [4])):
        listener = Listener()
        train(data, tmp_path / str(len(steps)), flags, sink=listener)
        assert [sample.step for sample in listener.of(SampleGenerated)] == steps
