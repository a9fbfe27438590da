"""Whole runs: their files, resuming with the same bits, signals, comparisons by one flag."""

import errno
import json
import signal
import threading
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from diloco.algorithm import AlphaMerge, RoundId
from diloco.checkpoint import Mirror, open_checkpoint
from diloco.config import plan_run
from diloco.data import Tokenizer
from diloco.errors import (
    CheckpointError,
    ConfigurationError,
    DiLoCoError,
    NonFiniteError,
    TransportError,
)
from diloco.events import Evaluated, Event, Interrupted, Note, RoundVoid, RunFinished, RunStarted, StepFinished
from diloco.outer import DiLoCo
from diloco.signals import StopAsked
from diloco.train import Fleet, MetFleet, RunSettings, Session, make_transport, run_training
from diloco.trained import load_trained
from diloco.transport import InProcessTransport, MeetingPlace
from tests.command_lines import command_line
from tests.faults import Fault, FaultyTransport
from tests.runs import Listener, settings_of, train, write_text
from tests.train.source_runs import session_of

CONTRACT = """heldout_loss perplexity bits_per_byte tokens steps sent_bytes_per_replica received_bytes_per_replica
data_parallel_bytes_per_replica compute_utilization wall_s rounds_committed rounds_void global_params_digest"""


def test_a_run_learns_and_leaves_what_scripts_count_on(data: Path, tmp_path: Path) -> None:
    listener = Listener()
    summary = train(data, tmp_path / "run", "--steps 60 --evaluation.every-steps 20", sink=listener)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert summary.keys() >= {*CONTRACT.split()}
    losses = [event.heldout_loss for event in listener.of(Evaluated)]
    assert len(losses) == 3, "at 20, at 40, and at the end"
    assert losses[-1] == summary["heldout_loss"] < losses[0] < 5.5
    assert summary["tokens"] == 60 * 2 * 2 * 16
    assert summary["interrupted"] is None
    steps = [event.step for event in listener.of(StepFinished)]
    assert steps == list(range(1, 61))
    started = listener.events[0]
    assert isinstance(started, RunStarted)
    assert len(started.facts) < 12, "the console prints a title and a line for each"
    assert isinstance(listener.events[-1], RunFinished)


class Interrupter(Listener):
    """Sends a signal after a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def handle(self, event: Event) -> None:
        super().handle(event)
        if isinstance(event, StepFinished) and event.step == self.step:
            signal.raise_signal(signal.SIGTERM)


SAME = ["global_params_digest", "heldout_loss", "sent_bytes_per_replica", "rounds_committed", "rounds_void", "epochs"]
RESUMABLE = [
    "--codec fp4 --sync.merge rebase --emulate.bandwidth 100kbit --emulate.latency 50ms --emulate.step-time 100ms",
    "--codec int8 --error-feedback 1 --merge-alpha 0.5 --data.streaming --data.heldout-fraction 0.2",
    "--algorithm diloco --fragments 1 --overlap-steps 0 --precision bfloat16 --optimizer.name SGD --sync.outer sgd",
    "--precision float16 --data-parallel-steps 3 --train.gradient-accumulation 2",
]


@pytest.mark.parametrize("arguments", RESUMABLE)
def test_a_run_stopped_in_flight_and_resumed_ends_as_if_it_had_not_stopped(
    data: Path, tmp_path: Path, arguments: str
) -> None:
    """Invariant 6 holds at a step with fragments in flight and at one inside a shared start."""
    whole = train(data, tmp_path / "whole", arguments)
    for stop in (2, 5) if "--data-parallel-steps" in arguments else (5,):
        folder, listener = tmp_path / f"stop-{stop}", Interrupter(stop)
        assert train(data, folder, arguments, sink=listener)["interrupted"] == "SIGTERM"
        assert [event.signal for event in listener.of(Interrupted)] == ["SIGTERM"]
        checkpoint = open_checkpoint(folder)
        assert checkpoint.step == stop
        if stop == 5 and "streaming" in str(checkpoint.about["algorithm"]) and "data-parallel" not in arguments:
            assert checkpoint.about["rounds_in_flight"] == ["fragment 0, outer step 0", "fragment 1, outer step 0"]
        resumed = train(data, folder, f"{arguments} --resume {folder}")
        for key in SAME:
            assert resumed[key] == whole[key], key
        if "bandwidth" in arguments:
            assert resumed["compute_utilization"] == whole["compute_utilization"]
        final = [open_checkpoint(tmp_path / "whole"), open_checkpoint(folder)]
        for part in ("replica-0", "replica-1"):
            local = [each.load(f"{part}-values") for each in final]
            assert all(torch.equal(local[0][name], local[1][name]) for name in local[0])
    assert not [thread for thread in threading.enumerate() if "batches" in thread.name], "all threads have ended"


def test_a_checkpoint_holds_the_global_parameters_ready_to_use(data: Path, tmp_path: Path) -> None:
    plain = train(data, tmp_path / "plain")
    trained = load_trained(tmp_path / "plain")
    assert trained.step == 12
    assert trained.model.num_parameters() == plain["parameters"]
    started = train(data, tmp_path / "run", f"--steps 2 --learning-rate 1e-9 --init-from {tmp_path / 'plain'}")
    assert started["heldout_loss"] == pytest.approx(plain["heldout_loss"], abs=1e-4)


def test_who_resumes_from_an_older_step_than_one_has_is_told(data: Path, tmp_path: Path) -> None:
    """Such as because the newest checkpoint of another rank is damaged."""
    train(data, tmp_path / "run", "--checkpoint.every-steps 4 --stop-after 8")
    settings, listener = settings_of(data, f"--resume {tmp_path / 'run'} --stop-after 9"), Listener()

    def meet(*_: object) -> Fleet:
        return Fleet(make_transport(settings).endpoints, held_steps={0: 8, 1: 4})

    run_training(settings, folder=tmp_path / "run", sink=listener, config_toml="", meet=meet)
    (note,) = listener.of(Note)
    assert note.text == "All ranks continue from step 4, the last one that is whole on rank 1; another rank has step 8."
    assert listener.of(RunStarted)[0].step == 4


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_ends_with_the_same_bits(
    data: Path, tmp_path: Path
) -> None:
    whole = train(data, tmp_path / "whole")
    out, listener = tmp_path / "run", Listener()
    train(data, out, "--checkpoint.every-steps 3 --stop-after 8")
    newest = out / "checkpoints" / "step-00000008"
    path = newest / "global.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"damaged.*step-00000006 in the same folder is complete"):
        train(data, out, f"--resume {newest}")
    summary = train(data, out, f"--resume {out}", sink=listener)
    assert summary["global_params_digest"] == whole["global_params_digest"]
    notes = " ".join(note.text for note in listener.of(Note))
    assert "global.safetensors is damaged" in notes
    assert "step-00000006; 2 steps are trained again" in notes


def test_a_folder_without_space_is_named(data: Path, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(Tokenizer, "save", side_effect=full), pytest.raises(DiLoCoError, match="run can't be wri"):
        train(data, tmp_path / "run")


def test_a_failed_upload_does_not_hide_why_the_run_ended(data: Path, tmp_path: Path) -> None:
    listener, failed = Listener(), CheckpointError("No space left.")
    explode = mock.patch.object(Session, "step", side_effect=NonFiniteError("The gradient norm is NaN."))
    upload = mock.patch.object(Mirror, "close", side_effect=failed)
    with explode, upload, pytest.raises(NonFiniteError, match="The gradient norm is NaN"):
        train(data, tmp_path / "run", f"--checkpoint.mirror {tmp_path / 'copy'}", sink=listener)
    assert listener.of(Note)[-1].text == "No space left."
    with upload, pytest.raises(CheckpointError, match="No space left"):
        train(data, tmp_path / "other", f"--checkpoint.mirror {tmp_path / 'other-copy'}")


class LosesOthers(MetFleet):
    """A fleet of one replica, which loses the others before step 4 and finds them at step 8."""

    def __init__(self, settings: RunSettings) -> None:
        Fleet.__init__(self, make_transport(settings).endpoints)  # it has met nobody
        directory = mock.MagicMock(findings=deque())
        directory.transport.views.replaced, directory.details.return_value = False, {}
        self._changed, self._news, self._listening = threading.Condition(), [], None
        self.directory, self.place, self.rejoins, self.lost = directory, MeetingPlace(), True, False

    def failure(self) -> TransportError | None:
        now, self.lost = self.lost, False
        return TransportError("All are silent.") if now else None

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        self.lost = step == 3
        return super().stop_step(step, wanted=wanted)

    def rejoin(self, patience_s: float) -> None:
        self.joining = True

    def join(self, timeout_s: float) -> int:
        self.joining, self.counted = False, (7, 30)  # of which this replica trained three steps of two sequences
        return 8


def test_the_steps_that_others_took_meanwhile_count_as_tokens_but_not_as_speed(data: Path, tmp_path: Path) -> None:
    """Before, a replica that joined late reported all tokens of the run as those of its own short time."""
    settings = settings_of(data, "--replicas 1")
    with mock.patch.object(DiLoCo, "take_over"):
        summary = run_training(
            settings,
            folder=tmp_path / "run",
            sink=Listener(),
            config_toml="",
            meet=lambda *_: LosesOthers(settings),
        )
    totals = open_checkpoint(tmp_path / "run").load("run")["totals"]
    assert (summary["steps"], summary["tokens"], totals["missed_steps"]) == (12, (30 + 4 * 2) * 16, 4)
    assert (summary["joined_at_step"], summary["trained_steps"]) == (8, 8)
    assert summary["tokens_per_s"] * (totals["compute_s"] + totals["exchange_s"]) == pytest.approx(8 * 2 * 16)


def test_who_is_stopped_while_it_adopts_a_state_keeps_all_of_its_own(data: Path) -> None:
    """Before, a replica in its shared start kept the fragments that had come beside its own others, and saved both."""
    fleet = LosesOthers(settings_of(data, arguments := "--replicas 1 --data-parallel-steps 6"))
    session, stop = session_of(data, arguments, fleet), mock.MagicMock(signal=None, interrupting=nullcontext)
    session.step()
    before, fleet.lost = session.global_digest(), True

    def adopt_half(diloco: DiLoCo, donors: object) -> None:
        diloco.fragments[0].state.values.zero_()
        diloco.fragments[0].reset_local(AlphaMerge())
        raise StopAsked

    with mock.patch.object(DiLoCo, "take_over", adopt_half):
        session.follow_views(stop)
    assert session.replicas[0].diloco is None
    assert session.global_digest() == before


def test_a_run_with_too_little_text_for_an_evaluation_trains_and_says_so(tmp_path: Path) -> None:
    path, sink = tmp_path / "text.txt", Listener()
    path.write_text("abcdefghi " * 60)
    summary = train(path, tmp_path / "run", "--data.heldout-fraction 0.001 --evaluation.every-steps 4", sink=sink)
    assert (summary["steps"], summary["heldout_loss"], sink.of(Evaluated)) == (12, None, [])
    (started,) = sink.of(RunStarted)
    assert started.facts["held out"] == "nothing, because there is too little; the loss is not evaluated"


def test_what_the_outer_loop_refuses_is_refused_before_a_shared_start(data: Path, tmp_path: Path) -> None:
    """Regression: after its last step, when nothing was saved."""
    own = tmp_path / "own.py"
    own.write_text("from diloco.algorithm import Int8\n\nclass Coarse(Int8):\n    needs_error_feedback = True\n")
    arguments, listener = f"--sync.arguments.average.codec {own}:Coarse", Listener()
    with pytest.raises(ConfigurationError, match="means have no error feedback"):
        train(data, tmp_path / "run", f"{arguments} --data-parallel-steps 2", sink=listener)
    assert not listener.events


def test_resuming_with_other_data_or_other_processes_is_refused(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path / "run", "--stop-after 3")
    for key, value in (("transport", "swarm"), ("replicas", 3), ("replica_size", 2)):
        with pytest.raises(ConfigurationError, match=f"cannot change network.{key} from "):
            plan_run(command_line(checkpoint__resume=tmp_path / "run", **{f"network__{key}": value}))
    other = write_text(tmp_path, seed=9)
    with pytest.raises(CheckpointError, match="and this run has data = "):
        train(other, tmp_path / "run", f"--resume {tmp_path / 'run'}")


def test_m_replicas_of_data_parallel_see_what_one_sees_with_a_batch_m_times_as_large(
    data: Path, tmp_path: Path
) -> None:
    arguments = (
        "--algorithm data-parallel --fragments 1 --overlap-steps 0 --optimizer.name SGD --optimizer.clip-norm None"
    )
    many = train(data, tmp_path / "many", f"{arguments} --replicas 4 --batch-size 1")
    one = train(data, tmp_path / "one", f"{arguments} --replicas 1 --batch-size 4")
    assert many["heldout_loss"] == pytest.approx(one["heldout_loss"], abs=1e-5)
    assert many["sent_bytes_per_replica"] == pytest.approx(many["data_parallel_bytes_per_replica"], rel=1e-3)
    assert one["sent_bytes_per_replica"] == one["data_parallel_bytes_per_replica"] == 0


def test_a_slow_link_costs_utilisation_and_overlap_wins_it_back(data: Path, tmp_path: Path) -> None:
    link = "--emulate.bandwidth 200kbit --emulate.latency 20ms --emulate.step-time 100ms --steps 24"
    names = {"waiting": "--overlap-steps 0 --codec float32", "overlap": "--codec float32"}
    runs = {name: train(data, tmp_path / name, f"{link} {more}") for name, more in names.items()}
    utilization = {name: run["compute_utilization"] for name, run in runs.items()}
    assert 0 < utilization["waiting"] < utilization["overlap"] <= 1
    free = train(data, tmp_path / "free", f"--steps 24 {names['overlap']}")
    assert free["global_params_digest"] == runs["overlap"]["global_params_digest"], "links change times, not bits"


def test_faults_void_their_rounds_and_training_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A void round of the shared start is tried again, and costs nothing but itself."""
    faults = [Fault(kind="drop", replica=1, round=RoundId(fragment, step)) for fragment, step in ((-1, 2), (0, 0))]
    faults.append(Fault(kind="truncate", replica=0, round=RoundId(1, 0)))
    monkeypatch.setattr(InProcessTransport, "faults", faults, raising=False)
    monkeypatch.setattr(InProcessTransport, "judge", FaultyTransport.judge)
    listener = Listener()
    summary = train(data, tmp_path / "run", "--data-parallel-steps 4", sink=listener)
    void = [(event.replica, event.fragment, event.outer_step) for event in listener.of(RoundVoid)]
    assert void == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    assert summary["rounds_void"] == 2
    assert summary["heldout_loss"] < 5.5
    told = [(event.step, event.text) for event in listener.of(Note) if "void" in event.text]
    assert [step for step, _ in told] == [2]
    assert told[0][1].startswith("gradients of step 2 is void: ")
    assert told[0][1].endswith("The round is tried again.")


def test_a_loss_that_explodes_stops_the_run_and_keeps_the_last_checkpoint(data: Path, tmp_path: Path) -> None:
    arguments = "--optimizer.name SGD --learning-rate 1e30 --optimizer.schedule constant --optimizer.clip-norm None"
    with pytest.raises(NonFiniteError, match="gradient norm of inner step"):
        train(data, tmp_path / "run", f"{arguments} --checkpoint.every-steps 1")
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.load("global").keys()
