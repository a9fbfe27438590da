"""A session is saved and loaded whole; with another number of replicas, no document is repeated or left out."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco.checkpoint import CheckpointWriter, list_checkpoints, open_checkpoint
from diloco.cli import main
from diloco.data import DataSettings, Sampler, build_corpus
from diloco.errors import CheckpointError
from diloco.events import Note, RoundCommitted
from diloco.model import with_vocabulary
from diloco.train import Fleet, RandomState, Session, held_step, load_session, make_transport, resolve, save_session
from tests.command_lines import load_configuration
from tests.processes import Processes, free_port
from tests.runs import SMALL, Listener, train, write_text
from tests.same import same

DOCUMENTS = 97
MOMENTA = "--optimizer.name Muon --sync.arguments.average.momentum true"
LENGTH = 16


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The documents that the replicas have read, by batch."""
    batches: list[list[str]] = []
    draw = Sampler.next_batch

    def watched(self: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = draw(self)
        batches.append([bytes(row[:-1].tolist()).decode() for row in inputs])
        return inputs, targets

    monkeypatch.setattr(Sampler, "next_batch", watched)
    return batches


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """Documents of one sequence each: 15 bytes and the end-of-document token."""
    path = tmp_path / "numbered.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n:06}"}) + "\n" for n in range(DOCUMENTS)))
    return path


# Two sequences a batch: 2 replicas to step 5, 4 to step 9, 1 to step 15, 3 to the end.
CHANGES = [(2, 5), (4, 9), (1, 15), (3, 20)]


def test_no_document_is_read_twice_or_left_out(read: list[list[str]], numbered: Path, tmp_path: Path) -> None:
    """The run has a shared start that ends after the first change."""
    fixed = "--steps 20 --data.heldout-fraction 0.05 --data-parallel-steps 7"
    for replicas, stop in CHANGES:
        arguments = f"{fixed} --replicas {replicas} --stop-after {stop}"
        train(numbered, tmp_path / "run", arguments + (f" --resume {tmp_path / 'run'}" if stop > 5 else ""))
    counted = Counter(document for batch in read for document in batch)
    drawn = sum(counted.values())
    assert drawn == 2 * (5 * 2 + 4 * 4 + 6 * 1 + 5 * 3)
    windows = len(counted)
    assert set(counted.values()) == {1, 2}
    assert list(counted.values()).count(2) == drawn - windows, "the second epoch begins when the first has ended"
    order = [document for batch in read for document in batch]
    whole = (windows // 2) * 2
    assert len(set(order[:whole])) == whole
    read.clear()
    corpus = build_corpus(DataSettings(paths=(str(numbered),), heldout_fraction=0.05))
    one = Sampler(corpus.train, sequence_length=LENGTH, batch_size=2, replica=0, num_replicas=1, seed=0)
    for _ in range(drawn // 2):
        one.next_batch()
    assert [document for batch in read for document in batch] == order, "the order of one replica, divided among all"


@pytest.mark.parametrize(("codec", "now"), [("fp4", 1), ("int8 --error-feedback 1", 3), (f"fp4 {MOMENTA}", 3)])
def test_what_goes_on_and_what_begins_anew(tmp_path: Path, codec: str, now: int) -> None:
    """Rounds are in flight at step 6. Replicas that stay keep their state, and new ones get the shared state."""
    data = write_text(tmp_path)
    run, arguments = tmp_path / "run", f"--steps 24 --codec {codec}"
    train(data, run, f"{arguments} --stop-after 5")
    before = open_checkpoint(run)
    assert before.about["rounds_in_flight"] == ["fragment 0, outer step 0", "fragment 1, outer step 0"]
    listener = Listener()
    train(data, run, f"{arguments} --resume {run} --replicas {now} "
          "--stop-after 12", sink=listener)  # fmt: skip
    texts = [event.text for event in listener.of(Note)]
    assert texts[0].startswith(f"{now} replicas continue where 2 stopped: ")
    assert ("fresh inner optimizer" in texts[0]) == (now > 2)
    assert ("is lost" in texts[0]) == (now < 2)
    assert texts[1:] == [
        f"fragment {p}, outer step 0 was in flight between other replicas and counts as void." for p in (0, 1)
    ]
    committed = listener.of(RoundCommitted)
    assert {event.contributors for event in committed} == {tuple(range(now))}
    after = open_checkpoint(run)
    assert after.about["num_replicas"] == now
    rest = [after.load(f"replica-{m}")["common"]["inner"]["rest"] for m in range(now)]
    steps = [next(kept["step"] for kept in slots.values() if "step" in kept) for slots in rest]
    assert steps == [12.0] * min(now, 2) + [7.0] * max(0, now - 2), "moments of new replicas start fresh"


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


@pytest.mark.parametrize("more", ["", MOMENTA])
def test_everything_comes_back(tmp_path: Path, more: str) -> None:
    """The session has rounds in flight, error feedback, and has drawn random numbers."""
    data = write_text(tmp_path)
    arguments = f"--steps 24 --codec fp4 --error-feedback 1 {more}"
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
    assert load_session(other, open_checkpoint(tmp_path), tmp_path) == ()
    assert (random.random(), np.random.random()) == following, "the generators of the process go on as well"
    assert any(fragment["in_flight"] for fragment in before[0]["diloco"]["fragments"])
    assert same(held_by(other), before)
    assert vars(other.totals) == totals
    assert other.traffic() == traffic


def test_independent_replicas_cannot_be_shared_out_anew(tmp_path: Path) -> None:
    data, run, arguments = write_text(tmp_path), tmp_path / "run", "--algorithm none --fragments 1 --overlap-steps 0"
    train(data, run, f"{arguments} --stop-after 3")
    with pytest.raises(CheckpointError, match="2 independent replicas"):
        train(data, run, f"{arguments} --resume {run} --replicas 3")


def rank(replica: int, arguments: str, port: int) -> int:
    place = f"--transport tcp --replica {replica} --join 127.0.0.1:{port}" if port else ""
    return main(["train", *arguments.split(), *place.split(), "--monitor.console", "quiet"])


def test_processes_go_on_as_more_and_as_fewer(tmp_path: Path) -> None:
    """Replica 2 is new and starts from replica 0's checkpoint. Then it and replica 1 leave."""
    data, digests = write_text(tmp_path), []
    for name, in_processes in (("many", True), ("one", False)):
        out = tmp_path / name
        for replicas, stop in ((2, 5), (3, 9), (1, 12)):
            begin = f"{SMALL} {data} --data-parallel-steps 3 --out {out}" if replicas == 2 else f"--resume {out}"
            arguments = f"{begin} --replicas {replicas} --stop-after {stop}"
            if in_processes:
                with Processes() as processes:
                    processes.start(replicas, rank, arguments, free_port())
                    assert set(processes.results(timeout_s=300).values()) == {0}
            else:
                assert rank(0, arguments, 0) == 0
        digests.append(json.loads((out / "summary.json").read_text())["global_params_digest"])
    assert digests[0] == digests[1]
    left = [list_checkpoints(tmp_path / "many" / f"replica-{m}" / "checkpoints")[-1] for m in (1, 2)]
    assert [checkpoint.step for checkpoint in left] == [9, 9]
    sent, sent_by_new = (checkpoint.load("run")["transport"]["traffic"][0] for checkpoint in left)
    assert 0 < sent_by_new < sent


def test_a_run_moves_between_one_process_and_several(tmp_path: Path) -> None:
    """With rounds in flight at every move; each replica keeps its moments and its random numbers."""
    data = write_text(tmp_path)
    whole = train(data, tmp_path / "whole", "--codec fp4")
    out = tmp_path / "run"
    for number, (place, stop) in enumerate((("tcp", 5), ("in-process", 9), ("tcp", 12), ("tcp", 12))):
        if number == 3:  # replica 1 was killed before it saved, and goes on from what one process saved for both
            shutil.rmtree(out / "replica-1" / "checkpoints" / "step-00000012")
            assert [held_step(home, m, out) for m, home in enumerate((out, out / "replica-1"))] == [12, 9]
        begin = f"--resume {out}" if number else f"{SMALL} {data} --codec fp4 --out {out}"
        arguments = f"{begin} --transport {place} --stop-after {stop}"
        with Processes() as processes:
            processes.start(2 if place == "tcp" else 1, rank, arguments, free_port() if place == "tcp" else 0)
            assert set(processes.results(timeout_s=300).values()) == {0}
        summary = json.loads((out / "summary.json").read_text())
        if place == "tcp":
            random_numbers = [open_checkpoint(each).load("run")["random"] for each in (out, out / "replica-1")]
            assert random_numbers[0] != random_numbers[1], "each process has its own"
    for key in ("global_params_digest", "heldout_loss", "sent_bytes_per_replica", "rounds_committed", "rounds_void"):
        assert summary[key] == whole[key], key


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
