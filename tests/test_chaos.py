"""`benchmarks.chaos`: its plan and its checks on made-up records, and a short run with real peers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.chaos import checks
from benchmarks.chaos.checks import Log
from benchmarks.chaos.network import Loopback
from benchmarks.chaos.plan import BOOTSTRAP, Event, Rates, fewest_healthy, least_healthy, plan_events
from benchmarks.chaos.processes import Life
from benchmarks.chaos.records import Left
from benchmarks.chaos.report import tables
from benchmarks.chaos.run import Conductor
from benchmarks.chaos.settings import Settings
from benchmarks.chaos.verdict import judge

LIMIT_S = 1.0


class TestPlan:
    @given(
        seed=st.integers(0, 2**32), peers=st.sampled_from([4, 5, 6]), minutes=st.floats(2, 20), can_cut=st.booleans()
    )
    @settings(max_examples=60, deadline=None)
    def test_a_majority_is_always_healthy_and_all_are_there_at_the_end(
        self, seed: int, peers: int, minutes: float, can_cut: bool
    ) -> None:
        rates = Rates(can_cut=can_cut)
        events = plan_events(seed, minutes, peers, rates)
        assert fewest_healthy(events, peers, rates) >= least_healthy(peers) >= 3
        assert [event.at_s for event in events] == sorted(event.at_s for event in events)
        for place in (*range(peers), BOOTSTRAP):
            alive = True
            for event in events:
                if event.peer == place and event.kind in ("resume", "join", "start bootstrap"):
                    assert not alive
                    alive = True
                elif event.peer == place:
                    assert alive
                    alive = event.kind not in ("kill", "leave", "kill bootstrap")
            assert alive
        assert all(event.at_s + event.seconds <= 60 * minutes for event in events)

    def test_it_is_a_function_of_the_seed(self) -> None:
        assert plan_events(7, 15, 5) == plan_events(7, 15, 5) != plan_events(8, 15, 5)

    @pytest.mark.parametrize("can_cut", [False, True])
    def test_fifteen_minutes_hold_sixty_events_of_all_kinds(self, can_cut: bool) -> None:
        rates = Rates(can_cut=can_cut)
        events = plan_events(7, 15, 5, rates)
        assert len(events) >= 60
        kinds = {event.kind for event in events}
        assert {"kill", "leave", "freeze", "slow", "resume", "join", "kill bootstrap", "start bootstrap"} <= kinds
        assert ("cut" in kinds) == can_cut
        frozen_s = [event.seconds for event in events if event.kind == "freeze"]
        assert min(frozen_s) < rates.silence_s < max(frozen_s)


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
        longest, faults = checks.standing_still([log(committed(0.1), *steps)], {"StepFinished": 2.0}, 100)
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
        longest, faults = checks.standing_still([frozen], {"StepFinished": 2.0}, 100)
        assert longest == {"StepFinished": 0.5}
        assert faults == []

    def test_who_stood_still_when_it_was_killed_stood_still(self) -> None:
        records = [committed(0.1), record(0.5, "StepFinished")]
        killed = log(*records, ended_by="kill", code=-9)
        assert len(checks.standing_still([killed], {"StepFinished": 2.0}, 100)[1]) == 1

    def test_who_does_not_come_back_is_a_fault(self) -> None:
        records = [committed(0.1), *(record(t / 2, "StepFinished") for t in range(200))]
        frozen = log(*records, disturbed=[(1.0, 2.0)], ended_s=100.0)
        assert "took no part" in checks.standing_still([frozen], {"StepFinished": 2.0}, 50)[1][0]

    def test_who_never_ended_hung(self) -> None:
        hung = log(committed(0.1), record(0.5, "StepFinished"), ended_s=None, code=None)
        assert "had not ended" in checks.standing_still([hung], {"StepFinished": 2.0}, 100)[1][0]


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
        assert "just went on" in checks.half_applied([log(committed(1)), gone_on])[0]

    def test_not_for_who_ended(self) -> None:
        assert checks.half_applied([log(committed(1)), log(sent(0), void(1), name="b")]) == []

    @pytest.mark.parametrize("void_s", [1.0, 2.5])
    def test_not_for_who_came_back(self, void_s: float) -> None:
        """The round is void before it looks for the others, or while it does."""
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


class TestEnds:
    def test_digests(self) -> None:
        assert checks.unequal_ends({"a": {"global_params_digest": "x"}, "b": {"global_params_digest": "x"}}) == []
        assert len(checks.unequal_ends({"a": {"global_params_digest": "x"}, "b": {"global_params_digest": "y"}})) == 1
        assert len(checks.unequal_ends({})) == 1

    @pytest.mark.parametrize(
        ("ended_by", "code", "faults"),
        [("", 0, 0), ("", 1, 1), ("", None, 1), ("kill", -9, 0), ("leave", 130, 0), ("leave", 1, 1), ("", -9, 1)],
    )
    def test_exit_codes(self, ended_by: str, code: int | None, faults: int) -> None:
        assert len(checks.unexpected_ends([life(ended_by=ended_by, code=code)])) == faults


def test_real_peers_survive_a_minute_of_it(tmp_path: Path) -> None:
    """Four peers; one is killed and comes back, one is frozen, and the standing peer is another one for a while."""
    set_up = Settings(peers=4, steps=600, step_s=0.1, silence_s=6.0, join_window_s=4.0, slack_s=60.0)
    events = (
        Event(3.0, "kill", 3, with_daemon=True),
        Event(5.0, "resume", 3),
        Event(6.0, "kill bootstrap", BOOTSTRAP),
        Event(7.0, "freeze", 2, 9.0, with_daemon=True),
        Event(9.0, "start bootstrap", BOOTSTRAP),
    )
    said: list[str] = []
    Conductor(set_up, tmp_path, Loopback(), said.append).run(events)
    run = judge(Left(tmp_path), events, ())
    told = tables({"command": "in a test", **run})
    assert {name: faults for name, faults in run["faults"].items() if faults} == {}, told + "\n".join(said)
    assert len(run["happened"]) == len(events)
    assert run["ended_peers"] == 4
    assert dataclasses.asdict(set_up)["steps"] == run["steps"]
