"""A session is saved and loaded whole, with the random numbers of its replicas."""

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco.checkpoint import CheckpointWriter, open_checkpoint
from diloco.data import build_corpus
from diloco.model import with_vocabulary
from diloco.train import Fleet, RandomState, Session, load_session, make_transport, resolve, save_session
from tests.command_lines import load_configuration
from tests.runs import SMALL, write_text
from tests.same import same


def make_session(data: Path, arguments: str) -> Session:
    configuration = load_configuration([*SMALL.split(), str(data), *arguments.split()])
    settings = resolve(configuration, num_layers=configuration.model.decoder.layers)
    corpus = build_corpus(settings.data)
    settings = replace(settings, model=with_vocabulary(settings.model, corpus.tokenizer.vocab_size))
    return Session(settings, corpus, Fleet(make_transport(settings)), torch.device("cpu"), lambda event: None)


def held_by(session: Session) -> list[Any]:
    """Return the whole state of the session's replicas."""
    return [
        {
            "model": dict(replica.model.state_dict()),
            "inner": replica.inner.state_dict(),
            "sampler": replica.sampler.state_dict(),
            "random": replica.random_state.state_dict(),
            "diloco": replica.diloco and replica.diloco.state_dict(),
        }
        for replica in session.replicas
    ]


def test_everything_comes_back(tmp_path: Path) -> None:
    """The session has rounds in flight, error feedback, and has drawn random numbers."""
    data = write_text(tmp_path)
    arguments = "--steps 24 --codec fp4 --error-feedback 1"
    session = make_session(data, arguments)
    for _ in range(10):
        session.step()
        for replica in session.replicas:
            with replica.random_state.active():
                torch.rand(3)
    writer = CheckpointWriter()
    save_session(session, writer, tmp_path / "checkpoints", keep=1)
    before, totals, traffic = copy.deepcopy(held_by(session)), dict(vars(session.totals)), session.traffic()
    following = (random.random(), np.random.random())
    session.step()  # while the checkpoint is written
    assert writer.poll(wait=True) == tmp_path / "checkpoints" / "step-00000010"
    other = make_session(data, arguments)
    assert load_session(other, open_checkpoint(tmp_path)) is None
    assert (random.random(), np.random.random()) == following, "the generators of the process go on as well"
    assert any(fragment["in_flight"] for fragment in before[0]["diloco"]["fragments"])
    assert same(held_by(other), before)
    assert vars(other.totals) == totals
    assert other.traffic() == traffic


def test_replicas_use_one_model_and_optimizer_while_they_average_gradients(tmp_path: Path) -> None:
    session, numbers = make_session(write_text(tmp_path), "--data-parallel-steps 2"), []
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
