import math

import pytest

from diloco import events
from diloco.monitor import Ema, RoundCounts, RunProgress, Throughput, wording
from tests.monitor.made_events import committed, evaluated, fetched, sent, step, void


def test_a_round_is_in_flight_until_its_last_replica_settles_it() -> None:
    rounds = RoundCounts()
    for replica in (0, 1):
        rounds.sent(sent(replica, 0, 3))
        rounds.sent(sent(replica, 2, 7))
    in_flight = [rounds.in_flight]
    for replica in (0, 1):
        rounds.settled(committed(replica, 0, 3))
        in_flight.append(rounds.in_flight)
    assert in_flight == [((0, 3), (2, 7)), ((0, 3), (2, 7)), ((2, 7),)]
    assert (rounds.committed, rounds.void) == (1, 0)


def test_replicas_that_disagree_about_a_round_count_it_as_both() -> None:
    rounds = RoundCounts()
    outcomes = [
        rounds.settled(event) for event in (committed(0, 0, 3), void(1, 0, 3), committed(2, 0, 3), void(3, 0, 3))
    ]
    assert outcomes == [True, True, False, False]
    assert (rounds.committed, rounds.void) == (1, 1)


def test_a_round_void_again_under_its_number_counts_again() -> None:
    rounds = RoundCounts()
    for _ in range(2):
        for replica in (0, 1):
            rounds.settled(void(replica, 0, 3))
    assert rounds.void == 2


def test_a_round_resumed_in_flight_can_settle_without_having_been_sent() -> None:
    rounds = RoundCounts()
    assert rounds.settled(committed(0, 0, 3))
    assert rounds.in_flight == ()


def test_a_void_round_is_worth_a_line_only_when_its_reason_changes() -> None:
    progress = RunProgress()
    news = [
        progress.take(void(0, 0, 3, "fragment 0, outer step 3: replica 2 is late"), 0.0),
        progress.take(void(1, 0, 3, "fragment 0, outer step 3: replica 2 is late"), 0.0),
        progress.take(void(0, 1, 4, "fragment 1, outer step 4: replica 2 is late"), 0.0),
        progress.take(void(0, 0, 4, "fragment 0, outer step 4: replica 1 is late"), 0.0),
        progress.take(void(0, 0, 5, "fragment 0, outer step 5: replica 2 is late"), 0.0),
    ]
    assert news == [True, False, False, True, True]
    assert progress.rounds.void == 4


def test_clamped_values_are_told_once_per_fragment() -> None:
    progress = RunProgress()
    contributions = [
        sent(0, 0, 1),
        sent(0, 0, 2, saturated=True),
        sent(0, 0, 3, saturated=True),
        sent(0, 1, 1, saturated=True),
    ]
    assert [progress.take(event, 0.0) for event in contributions] == [False, True, False, True]


def test_skipped_inner_steps_are_told_when_they_begin() -> None:
    progress = RunProgress()
    assert [progress.take(step(n, skipped_replicas=s), 0.0) for n, s in ((1, 0), (2, 2), (3, 1), (4, 0), (5, 1))] == [
        False,
        True,
        False,
        False,
        True,
    ]


def test_the_best_held_out_loss_is_a_finite_one() -> None:
    progress = RunProgress()
    for number, loss in ((1, math.nan), (2, 3.0), (3, math.nan), (4, 2.0), (5, 2.5)):
        progress.take(evaluated(number, loss), 0.0)
    assert (progress.heldout_loss, progress.best_heldout_loss, progress.best_step) == (2.5, 2.0, 4)


def test_a_note_in_the_middle_of_a_step_is_no_pause_and_an_evaluation_is_one() -> None:
    progress = RunProgress()
    for now_s, event in (
        (0.0, step(1)),
        (1.0, events.Note(step=1, text="hello")),
        (2.0, step(2)),
        (9.0, evaluated(2, 1.0)),
        (11.0, step(3)),
    ):
        progress.take(event, now_s)
    assert progress.speed.tokens_per_s == 0.5


def test_state_that_comes_is_no_line_and_a_pause() -> None:
    progress = RunProgress()
    assert [progress.take(event, now_s) for now_s, event in ((0.0, step(1)), (5.0, fetched(0, 50, 50, step=1)))] == [
        False,
        False,
    ]
    progress.take(step(2), 7.0)
    assert progress.speed.tokens_per_s == 0.5


@pytest.mark.parametrize(
    ("sent_bytes", "baseline", "words"),
    [
        (2_000_000, 824_000_000, "2.0 MB per replica, 412x less than data-parallel (824 MB)"),
        (1000, 1004, "1.0 kB per replica, as much as data-parallel"),
        (1000, 1006, "1.0 kB per replica, 1.01x less than data-parallel (1.0 kB)"),
        (1500, 1000, "1.5 kB per replica, 1.50x as much as data-parallel (1.0 kB)"),
        (0, 1000, "nothing (data-parallel: 1.0 kB)"),
        (0, 0, "0 B per replica"),
        (1000, None, "1.0 kB per replica"),
    ],
)
def test_the_summary_is_honest_about_data_parallel(sent_bytes: int, baseline: int | None, words: str) -> None:
    rows = dict(wording.summary({"sent_bytes_per_replica": sent_bytes, "data_parallel_bytes_per_replica": baseline}))
    assert rows["sent"] == words


def test_the_summary_tells_what_was_sent_after_a_shared_start() -> None:
    rows = dict(
        wording.summary(
            {
                "steps": 100,
                "sent_bytes_per_replica": 51_000,
                "data_parallel_bytes_per_replica": 100_000,
                "shared_start_steps": 50,
                "shared_start_sent_bytes_per_replica": 50_000,
            }
        )
    )
    assert rows["sent"] == "51.0 kB per replica, 2.0x less than data-parallel (100 kB)"
    assert rows["after start"] == "1.0 kB per replica, 50x less than data-parallel (50.0 kB)"


def test_a_summary_of_nothing_has_no_rows() -> None:
    assert (
        wording.summary(dict.fromkeys(("heldout_loss", "perplexity", "compute_utilization", "wall_s", "tokens"))) == []
    )


def test_long_paths_are_not_cut_in_a_table() -> None:
    path = "runs/" + "x" * 90
    assert path in wording.table([("run folder", path)])


def test_a_constant_is_its_own_average_from_the_first_value_on() -> None:
    ema = Ema(0.99)
    assert [ema.update(3.0) for _ in range(5)] == pytest.approx([3.0] * 5, rel=1e-12)


def test_the_average_is_corrected_for_its_start() -> None:
    ema = Ema(0.9)
    ema.update(1.0)
    # s_2 = 0.9 * 0.1 * 1 + 0.1 * 2 = 0.29, divided by 1 - 0.9^2 = 0.19
    assert ema.update(2.0) == pytest.approx(0.29 / 0.19, rel=1e-12)


def test_the_average_outlives_a_value_that_is_not_finite() -> None:
    ema = Ema(0.5)
    ema.update(1.0)
    assert math.isnan(ema.update(math.nan))
    assert ema.update(math.inf) == math.inf
    assert ema.value == 1.0


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_an_impossible_decay_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="0 <= decay < 1"):
        Ema(decay)


def test_no_rate_before_two_updates_lie_apart() -> None:
    speed = Throughput()
    assert speed.tokens_per_s is None
    speed.skip(1.0)
    speed.update(2.0, steps=1, tokens=10)
    assert speed.tokens_per_s is None
    assert speed.eta_s(10) is None
    speed.update(2.0, steps=2, tokens=20)
    assert speed.tokens_per_s is None
    speed.update(3.0, steps=3, tokens=30)
    assert speed.tokens_per_s == 20.0


def test_the_rate_forgets_what_lies_before_the_window() -> None:
    speed = Throughput(window_s=2.0)
    for now_s, tokens in ((0.0, 0), (1.0, 1000), (2.0, 1010), (3.0, 1020), (4.0, 1030)):
        speed.update(now_s, steps=int(now_s), tokens=tokens)
    assert speed.tokens_per_s == 10.0


def test_a_step_longer_than_the_window_still_has_a_rate() -> None:
    speed = Throughput(window_s=1.0)
    for number in range(4):
        speed.update(100.0 * number, steps=number, tokens=50 * number)
    assert speed.tokens_per_s == 0.5
    assert speed.eta_s(5) == 200.0


def test_pauses_do_not_slow_the_rate_and_do_count_in_the_time_left() -> None:
    speed = Throughput()
    speed.update(0.0, steps=1, tokens=100)
    speed.skip(7.0)
    speed.skip(10.0)
    speed.update(12.0, steps=2, tokens=200)
    assert speed.tokens_per_s == 50.0
    # two seconds of training and ten seconds of pauses for one step
    assert speed.eta_s(3) == 12.0
    assert speed.eta_s(2) == 0.0
    assert speed.eta_s(1) == 0.0
