"""A session is saved and loaded whole, with the random numbers of its replicas, also by processes of another kind."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from diloco.checkpoint import CheckpointWriter, open_checkpoint
from diloco.cli import main
from diloco.errors import CheckpointError, ConfigurationError
from diloco.train import RandomState, held_step, load_session, save_session
from tests.processes import Processes, free_port
from tests.runs import SMALL, of_torchrun, train
from tests.same import same
from tests.train.source_runs import session_of


def test_everything_that_is_saved_comes_back(data: Path, tmp_path: Path) -> None:
    """The session has rounds in flight, error feedback, and has drawn random numbers."""
    arguments, writer = "--steps 24 --codec fp4 --error-feedback 1", CheckpointWriter()
    session, other = (session_of(data, arguments) for _ in range(2))
    for _ in range(10):
        session.step()
        for replica in session.replicas:
            with replica.random_state.active():
                torch.rand(3)
    save_session(session, writer, tmp_path / "one", keep=1)
    following = (random.random(), np.random.random())
    session.step()  # while the checkpoint is written
    assert writer.poll(wait=True) == tmp_path / "one" / "step-00000010"
    load_session(other, one := open_checkpoint(tmp_path / "one"))
    save_session(other, writer, tmp_path / "other", keep=1)
    assert (random.random(), np.random.random()) == following, "the generators of the process go on as well"
    assert writer.poll(wait=True)
    again = open_checkpoint(tmp_path / "other")
    assert one.about["rounds_in_flight"]
    assert one.about == again.about
    assert one.parts.keys() == again.parts.keys()
    assert all(same(one.load(part), again.load(part)) for part in one.parts)


def rank(number: int, transport: str, arguments: str, port: int) -> int:
    """Train as a process of replica ``number`` alone."""
    place = f"--replica {number} --join 127.0.0.1:{port}" if transport == "tcp" else ""
    os.environ |= of_torchrun(number, 2, port) if transport == "torch" else {}
    return main(f"train {arguments} {place} --monitor.console quiet".split())


def test_a_run_moves_between_transports_in_flight_and_ends_with_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 5: after a shared start over process groups, each replica takes its moments, residual and rounds in
    flight with it."""
    out, lossy = tmp_path / "run", "--codec int8 --error-feedback 1 --data-parallel-steps 3"
    whole = train(data, tmp_path / "whole", lossy)
    ways = ("torch", 7), ("in-process", 8), ("tcp", 9), ("in-process", 10), ("torch", 11), ("in-process", 12)
    for transport, stop in ways:
        start = f"--resume {out}" if out.exists() else f"{SMALL} {data} {lossy} --out {out}"
        arguments = f"{start} --transport {transport} --stop-after {stop}"
        if stop == 9:  # it may go on in another folder
            out = tmp_path / "moved"
            arguments += f" --out {out}"
        if transport == "in-process":
            assert main(["train", *arguments.split(), "--monitor.console", "quiet"]) == 0
        else:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            with Processes() as processes:
                processes.start(2, rank, transport, arguments, store.port if transport == "torch" else free_port())
                assert set(processes.results(timeout_s=300).values()) == {0}
        assert open_checkpoint(out).about["rounds_in_flight"] or stop == 12
        own = out / "replica-1" / "checkpoints"
        if stop == 11:  # what goes on if the last checkpoint of one replica is missing, or that of another step
            shutil.move(own / "step-00000011", tmp_path / "away")
            assert [held_step(number, out) for number in (0, 1)] == [11, 10]
            with pytest.raises(CheckpointError, match=r"holds no replica 1: .* Copy the folders of all replicas"):
                train(data, out, f"{lossy} --resume {out}/checkpoints/step-00000011")
            monkeypatch.chdir(out / "checkpoints")  # a path may be relative to the checkpoints themselves
            assert held_step(0, Path("step-00000011", "..", "step-00000010")) == 10
            shutil.copytree(own / "step-00000009", own / "step-00000011")
            with pytest.raises(CheckpointError, match="have other global parameters"):
                train(data, out, f"{lossy} --resume step-00000011")
            shutil.rmtree(own / "step-00000011")
            shutil.move(tmp_path / "away", own / "step-00000011")
    summary = json.loads((out / "summary.json").read_text())
    for key in ("global_params_digest", "heldout_loss", "sent_bytes_per_replica", "rounds_committed", "rounds_void"):
        assert summary[key] == whole[key], key


ODD = f"{Path(__file__).parents[1] / 'odd_optimizer.py'}:OddAdam"


@pytest.mark.parametrize("shared_start", [0, 5])
def test_moments_of_another_type_than_the_parameters_stay_so(shared_start: int, data: Path, tmp_path: Path) -> None:
    """Resumed, moved to a transport with a process each, and where a shared start ends, the bits are the same."""
    arguments = f"--optimizer.name {ODD} --data-parallel-steps {shared_start}"
    whole = train(data, tmp_path / "whole", arguments)
    out = tmp_path / "stopped"
    for stop in (3, 8, 12):
        again = f" --resume {out}" if out.exists() else ""
        stopped = train(data, out, f"{arguments} --stop-after {stop}{again}")
    with Processes() as processes:
        line = f"{SMALL} {data} {arguments} --out {tmp_path / 'tcp'} --transport tcp"
        processes.start(2, rank, "tcp", line, free_port())
        assert set(processes.results(timeout_s=300).values()) == {0}
    over_tcp = json.loads((tmp_path / "tcp" / "summary.json").read_text())
    digests = {each["global_params_digest"] for each in (whole, stopped, over_tcp)}
    assert len(digests) == 1
    for folder in ("whole", "stopped"):
        own = open_checkpoint(tmp_path / folder).load("replica-1-own-0")["state"]["inner"]["slots"]
        assert {each.dtype for slots in own.values() for each in slots["moments"]} == {torch.bfloat16}


OWN = """
import torch

class Counts(torch.optim.SGD):
    \"\"\"Steps in its training mode only, ever more slowly, by a count that is in no parameter's state.\"\"\"

    count, mode = 0, "eval"

    def train(self):
        self.mode = "train"

    def step(self, closure=None):
        assert self.mode == "train"
        self.count += 1
        for group in self.param_groups:
            group["lr"] /= self.count
        super().step()

    def state_dict(self):
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state):
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})
        self.count = state["count"]

class Bare(torch.optim.SGD):
    def state_dict(self):
        return {"count": 1}
"""


@pytest.mark.parametrize("shared_start", [0, 5])
def test_an_optimizer_is_in_its_training_mode_and_all_of_its_state_is_saved(
    shared_start: int, data: Path, tmp_path: Path
) -> None:
    (code := tmp_path / "own.py").write_text(OWN)
    arguments = f"--optimizer.name {code}:Counts --data-parallel-steps {shared_start}"
    whole = train(data, tmp_path / "whole", arguments)
    train(data, tmp_path / "stopped", f"{arguments} --stop-after 7")
    again = train(data, tmp_path / "stopped", f"{arguments} --resume {tmp_path / 'stopped'}")
    assert again["global_params_digest"] == whole["global_params_digest"]
    with pytest.raises(ConfigurationError, match=r"its state_dict\(\) returned count. Checkpoints need the 'state'"):
        train(data, tmp_path / "bare", f"--optimizer.name {code}:Bare")
    assert not (tmp_path / "bare").exists()


def test_replicas_use_one_model_and_optimizer_while_they_average_gradients(data: Path) -> None:
    session, numbers = session_of(data, "--data-parallel-steps 2"), []
    for _ in range(3):
        numbers.append(len({id(replica.inner) for replica in session.replicas}))
        session.step()
    assert numbers == [1, 1, 2]


def draw() -> tuple[Any, ...]:
    """Draw an odd number of normal numbers, so that one is left in the generator's cache."""
    return torch.rand(3).tolist(), torch.randn(1).item(), torch.nn.functional.dropout(torch.ones(8)).tolist()


def drawn(state: RandomState, times: int = 1) -> list[tuple[Any, ...]]:
    result = []
    for _ in range(times):
        with state.active():
            result.append(draw())
    return result


def test_replicas_in_turns_draw_what_each_would_draw_alone() -> None:
    """They draw only their own random numbers, and the process keeps its own."""
    alone = [drawn(RandomState(3, replica), times=3) for replica in range(3)]
    together = [RandomState(3, replica) for replica in range(3)]
    in_turns: list[list[tuple[Any, ...]]] = [[], [], []]
    for _ in range(3):
        for replica, state in enumerate(together):
            in_turns[replica] += drawn(state)
            draw()  # the process keeps drawing too
    assert in_turns == alone


@pytest.mark.parametrize("draws", [0, 1, 2])
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_saved_state_goes_on_where_it_was(draws: int, gpus: int) -> None:
    """Also without the GPU of the machine on which it was saved."""
    state, other = RandomState(0, 0), RandomState(5, 5)
    drawn(state, draws)
    saved = state.state_dict()
    saved["torch"] += [torch.zeros(16, dtype=torch.uint8)] * gpus
    expected = drawn(state, times=3)  # the saved state does not change with it
    other.load_state_dict(saved)
    assert drawn(other, times=3) == expected
