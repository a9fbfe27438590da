"""`benchmarks.chaos`: its plan, its checks on artificial records, and a short run with real peers."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.chaos import checks, ends
from benchmarks.chaos.cases import CASES, cases_table, found
from benchmarks.chaos.checks import Log
from benchmarks.chaos.events import BOOTSTRAP, ENDS, RETURNS, Event, Rates
from benchmarks.chaos.network import Loopback, Wan
from benchmarks.chaos.paced import read_seconds, set_seconds, shift_clock
from benchmarks.chaos.peers import Peers
from benchmarks.chaos.plan import fewest_healthy, least_healthy, plan_events
from benchmarks.chaos.processes import Life, Running, Tail, descendants
from benchmarks.chaos.records import RunRecords
from benchmarks.chaos.report import tables, write_between
from benchmarks.chaos.run import Conductor
from benchmarks.chaos.settings import Settings
from benchmarks.chaos.verdict import judge
from diloco import events as facts
from diloco.config import parse_arguments, plan_run
from diloco.monitor import files
from tests.commands import Command
from tests.processes import Processes

OF_LINKS = {"cut", "mute", "accused", "pair", "flap"}
OF_A_SWARM = {"leave", "group SIGINT", "group SIGTERM", "kill bootstrap", "start bootstrap", "join"}
TRANSPORTS = pytest.mark.parametrize("transport", ["hivemind", "torch"])


class TestPlan:
    @given(
        seed=st.integers(0, 2**32),
        peers=st.sampled_from([4, 5, 6]),
        minutes=st.floats(2, 20),
        can_cut=st.booleans(),
        transport=st.sampled_from(["hivemind", "torch"]),
    )
    @settings(max_examples=60, deadline=None)
    def test_a_majority_is_always_healthy_and_all_are_there_at_the_end(
        self, seed: int, peers: int, minutes: float, can_cut: bool, transport: str
    ) -> None:
        rates = Rates(can_cut=can_cut, transport=transport)
        events = plan_events(seed, minutes, peers, rates)
        assert fewest_healthy(events, peers, rates) >= least_healthy(peers) >= 3
        assert [event.at_s for event in events] == sorted(event.at_s for event in events)
        for place in (*range(peers), BOOTSTRAP):
            alive = True
            for event in events:
                if event.peer == place and event.kind in (*RETURNS, "start bootstrap"):
                    assert not alive
                    alive = True
                elif place in (event.peer, *event.others):
                    assert alive
                    alive = place != event.peer or event.kind not in (*ENDS, "kill bootstrap")
            assert alive
        assert all(event.at_s + event.seconds <= 60 * minutes for event in events)
        assert [event.kind for event in events].index("thaw at the end") == len(events) - 1

    @given(seed=st.integers(0, 2**32))
    @settings(max_examples=30, deadline=None)
    def test_nothing_is_done_to_a_peer_while_it_is_disturbed_but_to_its_clock(self, seed: int) -> None:
        until_s = dict.fromkeys(range(5), 0.0)
        for event in plan_events(seed, 15, 5, Rates(can_cut=True)):
            for peer in event.stalls:
                assert until_s[peer] <= event.at_s
                until_s[peer] = event.at_s + event.seconds

    def test_it_is_a_function_of_the_seed(self) -> None:
        assert plan_events(7, 15, 5) == plan_events(7, 15, 5) != plan_events(8, 15, 5)

    @TRANSPORTS
    @pytest.mark.parametrize("can_cut", [False, True])
    @pytest.mark.parametrize("seed", [7, 8])
    def test_fifteen_minutes_hold_events_of_all_kinds_that_there_can_be(
        self, seed: int, can_cut: bool, transport: str
    ) -> None:
        rates = Rates(can_cut=can_cut, transport=transport)
        events = plan_events(seed, 15, 5, rates)
        assert len(events) >= 40
        all_kinds = set(rates.weights) | {"resume", "thaw at the end"}
        all_kinds |= set() if transport == "torch" else {"join", "start bootstrap"}
        kinds = {event.kind for event in events}
        assert kinds == all_kinds
        assert bool(kinds & OF_LINKS) == can_cut
        assert bool(kinds & OF_A_SWARM) == (transport == "hivemind")
        frozen_s = [event.seconds for event in events if event.kind == "freeze"]
        assert min(frozen_s) < rates.silence_s < max(frozen_s)


class TestEvent:
    @given(event=st.builds(Event, st.just(0.0), st.sampled_from(sorted(Rates(can_cut=True).weights)), st.just(0)))
    def test_what_is_begun_is_ended_when_the_event_is_over(self, event: Event) -> None:
        timetable = dataclasses.replace(event, seconds=7.7, others=(1,)).timetable
        times_s = [at_s for at_s, _ in timetable]
        assert times_s == sorted(times_s)
        assert not timetable or (times_s[0], times_s[-1]) == (0.0, 7.7)
        verbs = [verb for _, verb in timetable]
        assert verbs == verbs[:2] * (len(verbs) // 2)

    def test_a_flap_is_three_seconds_off_and_three_on(self) -> None:
        timetable = Event(0.0, "flap", 0, 180.0).timetable
        assert timetable[:3] == ((0.0, "off"), (3.0, "on"), (6.0, "off"))
        assert len(timetable) == 60

    def test_who_is_accused_does_not_hear_two_who_hear_it_and_are_not_to_stall(self) -> None:
        accused = Event(0.0, "accused", 3, 14.0, others=(0, 1))
        assert accused.silenced == ((0, 3), (1, 3))
        assert accused.stalls == (3,)
        assert Event(0.0, "clock", 1, 9.0, clock_s=3600.0).stalls == ()


class TestNetwork:
    def test_one_way_needs_nothing_of_the_script_but_to_run_a_command_in_a_node(self, tmp_path: Path) -> None:
        script = tmp_path / "script"
        script.write_text(f'#!/bin/sh\necho "$WAN_PREFIX $*" >> {tmp_path}/done\n')
        script.chmod(0o755)
        network = Wan(script, "x")
        network.silence(1, 4)
        network.hear(1, 4)
        assert (tmp_path / "done").read_text().splitlines() == [
            "x exec 1 ip route add blackhole 10.77.0.5/32",
            "x exec 1 ip route del blackhole 10.77.0.5/32",
        ]


class TestProcesses:
    def test_the_clock_of_a_process_is_stepped_and_its_records_keep_the_machines(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(time, "time", time.time)  # both are restored afterwards
        monkeypatch.setattr(files, "time", files.time)
        true, held = time.time, tmp_path / "clock"
        set_seconds(held, 0.0)
        shift_clock(read_seconds(held))
        sink = files.MetricsFile(tmp_path / "metrics.jsonl")
        for off_s in (0.0, 3600.0, -3600.0):
            set_seconds(held, off_s)
            assert time.time() - true() == pytest.approx(off_s, abs=5.0)
            sink.handle(facts.Note(step=0, text="now"))
        sink.close()
        assert [each["time_s"] for each in files.read_metrics(tmp_path / "metrics.jsonl")] == pytest.approx(
            [true()] * 3, abs=5.0
        )

    def test_a_daemon_in_a_session_of_its_own_goes_with_its_machine(self, tmp_path: Path) -> None:
        """A signal to the group does not reach it, but one to every process that a peer started does."""
        waits = "import sys; print(flush=True); sys.stdin.read()"
        starts = (
            f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {waits!r}], stdin=-1, stdout=-1, "
        )
        starts += "start_new_session=True); p.stdout.readline(); print('ready', flush=True); p.wait()"
        running = Running([sys.executable, "-c", starts], life(folder=str(tmp_path)), tmp_path / "said.txt")
        try:
            while "ready" not in running.printed():
                assert running.is_alive
            (daemon,) = descendants(running.process.pid)
        finally:
            running.end()
        assert "ready" in running.life.words
        limit_s = time.monotonic() + 30
        while not is_over(daemon):
            assert time.monotonic() < limit_s

    @TRANSPORTS
    def test_the_commands_of_peers_are_ones_that_diloco_takes(
        self, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A torch replica is restarted with the same command and the address of another replica as rendezvous."""
        commands: list[list[str]] = []

        class Started:
            def __init__(self, command: list[str], life: Life, output: Path) -> None:
                commands.append(command)
                self.life, self.is_alive = life, True
                self.tail = Tail(tmp_path / "none")

        monkeypatch.setattr("benchmarks.chaos.peers.Running", Started)
        peers = Peers(Settings(transport=transport, peers=2, numbered=True), tmp_path, Loopback())
        for peer in (0, 1):
            peers.start(peer)
            tail = peers.running[peer].tail
            tail.facts = {"control addresses": f"0 at 10.0.0.1:1, {peer} at 10.0.0.1:{peer + 1}"}
        tail.steps_s = tail.committed_s = time.time()  # the second peer trains
        if transport == "torch":
            peers.start(0)
            assert commands[2][commands[2].index("--join") + 1] == "10.0.0.1:2"
        for number, command in enumerate(commands):
            plan = plan_run(parse_arguments(command[command.index("train") + 1 :]))
            assert plan.configuration.network.transport == transport
            assert plan.configuration.network.replica == (0, 1, 0)[number]


def is_over(pid: int) -> bool:
    """Return whether a process has ended, even if it has not been reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def life(name: str = "a", **fields: Any) -> Life:
    return Life(**{"peer": 0, "folder": f"runs/{name}", "started_s": 0.0, "ended_s": 10.0, "code": 0, **fields})


def record(time_s: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"time_s": time_s, "event": event, "step": 0, "replica": 0, **fields}


def sent(time_s: float, outer_step: int = 0, digest: str = "d", replica: int = 0) -> dict[str, Any]:
    return record(time_s, "RoundSent", fragment=0, outer_step=outer_step, digest=digest, replica=replica)


def committed(time_s: float, outer_step: int = 0, contributors: tuple[int, ...] = (0, 1), replica: int = 0) -> Any:
    fields = {"fragment": 0, "outer_step": outer_step, "contributors": list(contributors), "replica": replica}
    return record(time_s, "RoundCommitted", **fields)


def void(time_s: float, outer_step: int = 0, reason: str = "late") -> dict[str, Any]:
    return record(time_s, "RoundVoid", fragment=0, outer_step=outer_step, reason=reason)


def log(*records: dict[str, Any], **fields: Any) -> Log:
    return Log(life(**fields), records)


class TestStandingStill:
    def test_a_long_step_is_a_fault_and_told_where(self) -> None:
        steps = [record(time_s, "StepFinished") for time_s in (0.5, 1.0, 5.0)]
        longest, faults = checks.stalled([log(committed(0.1), *steps)], {"StepFinished": 2.0}, 100)
        assert longest == {"StepFinished": 4.0}
        assert len(faults) == 1
        assert "4.0 s from 1.0" in faults[0]

    def test_what_befell_the_peer_itself_does_not_count(self) -> None:
        times_s = (0.5, 1.0, 5.0, 5.5)
        records = [
            committed(0.1),
            *(record(time_s, "StepFinished") for time_s in times_s),
            committed(5.2),
            committed(6),
        ]
        frozen = log(*records, disturbed=[(1.5, 4.5)])
        longest, faults = checks.stalled([frozen], {"StepFinished": 2.0}, 100)
        assert longest == {"StepFinished": 0.5}
        assert faults == []

    def test_who_stood_still_when_it_was_killed_stood_still(self) -> None:
        records = [committed(0.1), record(0.5, "StepFinished")]
        killed = log(*records, ended_by="kill", code=-9)
        assert len(checks.stalled([killed], {"StepFinished": 2.0}, 100)[1]) == 1

    def test_who_does_not_come_back_is_a_fault(self) -> None:
        records = [committed(0.1), *(record(t / 2, "StepFinished") for t in range(200))]
        frozen = log(*records, disturbed=[(1.0, 2.0)], ended_s=100.0)
        assert "took no part" in checks.stalled([frozen], {"StepFinished": 2.0}, 50)[1][0]

    def test_who_waited_in_vain_until_it_gave_up_stood_still(self) -> None:
        gave_up = log(committed(0.1), record(0.5, "StepFinished"), code=1)
        assert len(checks.stalled([gave_up], {"StepFinished": 2.0}, 100)[1]) == 1

    def test_who_never_ended_hung(self) -> None:
        hung = log(committed(0.1), record(0.5, "StepFinished"), ended_s=None, code=None)
        assert "had not ended" in checks.stalled([hung], {"StepFinished": 2.0}, 100)[1][0]


def test_the_pace_is_that_of_the_slowest_in_whose_way_nothing_was_put() -> None:
    logs = []
    for peer, every_s in enumerate((0.5, 1.0, 5.0)):
        steps = [record(number * every_s, "StepFinished") for number in range(int(40 / every_s))]
        logs.append(log(*steps, peer=peer, name=str(peer)))
    assert checks.pace(logs, (2,), 10.0, 30.0, 0.5) == 0.5
    assert checks.pace(logs, (), 10.0, 30.0, 0.5) == 0.1


class TestRounds:
    def test_the_same_on_all_is_fine(self) -> None:
        both = [log(sent(0), committed(1)), log(sent(0, replica=1), committed(1, replica=1), name="b")]
        assert checks.half_applied(both) == []

    def test_other_contributors_on_another_one_are_a_fault(self) -> None:
        both = [log(sent(0), committed(1)), log(committed(1, contributors=(1,), replica=1), name="b")]
        assert "2 ways" in checks.half_applied(both)[0]

    def test_contributions_from_two_states_are_a_fault(self) -> None:
        both = [log(sent(0), committed(1)), log(sent(0, digest="e", replica=1), committed(1, replica=1), name="b")]
        assert "2 states" in checks.half_applied(both)[0]

    def test_void_here_and_committed_there_is_a_fault_for_who_goes_on(self) -> None:
        gone_on = log(sent(0), void(1), sent(2, 1), committed(3, 1), name="b")
        assert "did not rejoin" in checks.half_applied([log(committed(1)), gone_on])[0]

    def test_not_for_who_ended(self) -> None:
        assert checks.half_applied([log(committed(1)), log(sent(0), void(1), name="b")]) == []

    @pytest.mark.parametrize("void_s", [1.0, 2.5])
    def test_not_for_who_came_back(self, void_s: float) -> None:
        """The round is void before the replica searches for the others, or while it does."""
        records = [
            sent(0),
            void(void_s),
            record(2, "Note", text=f"lost. {checks.LOOKS_FOR_OTHERS}, and keeps its work."),
            record(3, "Note", text=f"Replica 1 {checks.IS_BACK}."),
            sent(4, 1),
            committed(5, 1),
        ]
        back = log(*sorted(records, key=lambda each: each["time_s"]), name="b")
        assert checks.half_applied([log(committed(1), committed(5, 1)), back]) == []

    def test_nor_for_what_came_of_a_round_sent_before(self) -> None:
        late = log(sent(0), sent(0.5, 1), void(1), committed(2, 1), name="b")
        assert checks.half_applied([log(committed(1), committed(2, 1)), late]) == []

    def test_nor_for_who_was_still_taking_over(self) -> None:
        joiner = log(sent(0), void(1, reason=f"replica 1 {checks.TAKING_OVER}"), sent(2, 1), committed(3, 1), name="b")
        assert checks.half_applied([log(committed(1), committed(3, 1)), joiner]) == []

    def test_a_state_that_had_to_be_repaired_is_a_fault(self) -> None:
        assert len(checks.repaired([log(void(1, reason=f"{checks.DIFFERS} 1 differ from those of replica 0"))])) == 1


def left(time_s: float, *replicas: int, view: int = 1, replica: int = 0) -> dict[str, Any]:
    fields = {"view": view, "members": [], "joined": [], "left": list(replicas), "reason": "", "replica": replica}
    return record(time_s, "ViewChanged", **fields)


class TestPutOut:
    """Of three replicas, replica 0 reports at 20 s that replica 1 is no longer a member."""

    BACK_S, NOTICED_S = 30.0, 5.0

    def found(self, says: dict[str, Any], about: Log) -> list[tuple[float, str]]:
        steps = [record(float(at_s), "StepFinished") for at_s in range(100)]
        who = log(sent(0), committed(0.5), says, *steps, ended_s=100.0)
        return checks.evicted([who, about], self.BACK_S, self.NOTICED_S)

    def about(self, *records: dict[str, Any], **fields: Any) -> Log:
        steps = [record(float(at_s), "StepFinished", replica=1) for at_s in range(int(fields.get("ended_s", 100)))]
        rounds = [sent(0, replica=1), committed(0.5, replica=1), *records]
        return log(*rounds, *steps, **({"name": "b", "peer": 1, "ended_s": 100.0} | fields))

    def test_for_nothing(self) -> None:
        ((time_s, words),) = self.found(left(20, 1), self.about())
        assert time_s == 20
        assert "replica 1 was evicted" in words

    @pytest.mark.parametrize("words", [checks.LOOKS_FOR_OTHERS, f"{checks.GONE_ON} 1: it is late."])
    def test_once_where_it_says_so_itself(self, words: str) -> None:
        about = self.about(record(20.2, "Note", text=words))
        assert len(self.found(left(20, 1), about)) == 1
        assert len(self.found(left(20, 2), about)) == 2  # nothing is known of replica 2

    def test_once_for_all_who_say_so(self) -> None:
        other = log(sent(0, replica=2), committed(0.5, replica=2), left(20.5, 1, replica=2), name="c", peer=2)
        both = [self.about(), log(sent(0), committed(0.5), left(20, 1)), other]
        assert len(checks.evicted(both, self.BACK_S, self.NOTICED_S)) == 1

    @pytest.mark.parametrize(
        ("fields", "records"),
        [
            ({"disturbed": [(10.0, 17.0)]}, [committed(18, 1)]),  # it was frozen, and continued in time
            ({"disturbed": [(10.0, 15.0)]}, []),  # it did not rejoin
            ({"ended_s": 15.0, "ended_by": "kill"}, []),
            ({"started_s": 17.0}, [committed(18, 1)]),  # it has just started
        ],
    )
    def test_not_for_nothing(self, fields: dict[str, Any], records: list[dict[str, Any]]) -> None:
        assert self.found(left(20, 1), self.about(*records, **fields)) == []

    def test_what_is_said_by_one_that_was_cut_off_does_not_count(self) -> None:
        says = log(sent(0), committed(0.5), left(20, 1), disturbed=[(10.0, 30.0)], ended_s=40.0)
        assert checks.evicted([says, self.about()], self.BACK_S, self.NOTICED_S) == []


class TestEnds:
    @pytest.mark.parametrize(("words", "faults"), [("all is well\n", 0), ("x\n" * 80, 1)])
    def test_more_than_a_screen_is_a_fault(self, words: str, faults: int) -> None:
        assert len(ends.tracebacks([life(words=words)])) == faults

    def test_a_traceback_is_a_fault(self) -> None:
        (fault,) = ends.tracebacks([life(words="well\nTraceback (most recent call last):\n  File"), life()])
        assert "a traceback" in fault

    def test_digests(self) -> None:
        assert ends.unequal_ends({"a": {"global_params_digest": "x"}, "b": {"global_params_digest": "x"}}) == []
        assert len(ends.unequal_ends({"a": {"global_params_digest": "x"}, "b": {"global_params_digest": "y"}})) == 1
        assert len(ends.unequal_ends({})) == 1

    @pytest.mark.parametrize(
        ("ended_by", "code", "faults"),
        [
            *[("", 0, 0), ("", 1, 1), ("", None, 1), ("", -9, 1), ("kill", -9, 0), ("leave", 130, 0), ("leave", 1, 1)],
            *[("group SIGINT", 130, 0), ("group SIGTERM", -9, 1), ("group SIGTERM", None, 1)],
            *[("thaw at the end", 130, 0), ("thaw at the end", None, 1), ("thaw at the end", -9, 1)],
        ],
    )
    def test_exit_codes(self, ended_by: str, code: int | None, faults: int) -> None:
        assert len(ends.unexpected_ends([life(ended_by=ended_by, code=code)])) == faults


class TestReport:
    def test_what_stands_between_two_marks_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "README.md"
        path.write_text("prose\n<!-- first -->\nold\n<!-- second -->\nother\n")
        write_between("<!-- first -->", "new", path)
        assert path.read_text() == "prose\n<!-- first -->\n\nnew\n<!-- second -->\nother\n"
        write_between("<!-- second -->", "newer", path)
        assert path.read_text() == "prose\n<!-- first -->\n\nnew\n<!-- second -->\n\nnewer\n"


def test_cases_are_told_apart_and_each_is_over_when_its_run_is() -> None:
    assert len({case.key for case in CASES}) == len(CASES)
    for case in CASES:
        lasts_s = case.settings.steps * case.settings.step_s
        assert lasts_s >= max(event.at_s + event.seconds for event in case.events) + 45


def test_the_table_of_the_cases_has_a_row_for_each_version() -> None:
    row = {"ended_by_themselves": {"1": 1, "2": None}, "came_to_the_end": 2, "stood_still_s": 9.5, "pace": 0.25}
    row |= {"put_out": 0, "back_s": None, "faults": {"no process ended by itself": ["two"]}}
    case = CASES[0]
    shown = cases_table({"1.0": {case.key: row}, "2.0": {case.key: row | {"pace": None, "back_s": 2.5}}})
    heads, _, first, second = shown.splitlines()
    assert first == f"| {case.key} | 1.0 | 1: 1, 2: hangs | 2 of 4 | 9.5 | 25% | 0 |  | no process ended by itself |"
    assert heads.count("|") == first.count("|") == second.count("|")
    assert "| 2.5 |" in second


class Forked(Running):
    """A forked process, which imports nothing again."""

    processes: Processes

    def __init__(self, command: Sequence[str], life: Life, output: Path) -> None:
        self.life, self.output, self.tail = life, output, Tail(Path(life.folder) / "metrics.jsonl")
        self.process = Command(self.processes, command[3:], output, module=command[2])  # type: ignore[assignment]


def test_real_peers_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three peers is killed and restarted, one is frozen, and the bootstrap peer is down for a while.

    The figures of a case come from the same checks as those of the run.
    """
    times_s = {"silence_s": 6.0, "join_window_s": 4.0, "heartbeat_s": 0.5, "slack_s": 60.0}
    set_up = Settings(peers=3, steps=150, step_s=0.4, hurries=True, **times_s)
    events = (
        Event(0.5, "kill", 2, with_daemon=True),
        Event(1.0, "resume", 2),
        Event(1.2, "kill bootstrap", BOOTSTRAP),
        Event(1.5, "freeze", 1, 7.0, with_daemon=True),
        Event(3.0, "start bootstrap", BOOTSTRAP),
    )
    lines: list[str] = []
    with Processes() as processes:
        monkeypatch.setattr(Forked, "processes", processes, raising=False)
        monkeypatch.setattr("benchmarks.chaos.peers.Running", Forked)
        Conductor(set_up, tmp_path, Loopback(), lines.append).run(events)
    left_behind = RunRecords(tmp_path)
    run = judge(left_behind, events, ())
    shown = tables([{"command": "in a test", **run}])
    assert {name: faults for name, faults in run["faults"].items() if faults} == {}, shown + "\n".join(lines)
    assert len(run["happened"]) == len(events)
    assert run["ended_peers"] == 3
    assert dataclasses.asdict(set_up)["steps"] == run["steps"]
    case = CASES[0]
    row = found(dataclasses.replace(case, events=events), left_behind)
    assert (row["ended_by_themselves"], row["came_to_the_end"], row["faults"]) == ({}, 3, {})
    assert f"| {case.key} | 1.0 | none | 3 of {case.peers} |" in cases_table({"1.0": {case.key: row}})
