import math

import pytest

from diloco import events
from diloco.monitor import RunProgress
from tests.monitor.made_events import committed, evaluated, sent, started, step, view, void


def news(progress: RunProgress, *facts: events.Event) -> list[bool]:
    return [bool(progress.take(event, 0.0)) for event in facts]


def test_each_round_counts_once_however_many_replicas_report_it() -> None:
    progress = RunProgress()
    news(progress, committed(0, 0, 3), committed(1, 0, 3), committed(0, 2, 7), committed(0, 0, 4))
    # a void round is repeated under its outer step, and replicas may disagree about a round
    news(progress, void(0, 0, 5), void(1, 0, 5), void(0, 0, 5), void(1, 0, 5), void(3, 0, 4))
    assert (progress.committed, progress.void) == (3, 3)


def test_the_best_held_out_loss_is_a_finite_one_also_of_before_a_resumption() -> None:
    progress = RunProgress()
    progress.take(started(6, best_heldout_loss=3.5, rounds_committed=7, rounds_void=1), 0.0)
    losses = (math.nan, 3.0, math.nan, 4.0, 2.0, 2.5)
    said = [progress.take(evaluated(n, loss), 0.0) for n, loss in enumerate(losses)]
    assert ["(best)" in line for line in said] == [False, True, False, False, True, False]
    assert (progress.heldout_loss, progress.best_heldout_loss) == (2.5, 2.0)
    assert (progress.committed, progress.void) == (7, 1)


def test_the_held_out_losses_of_replicas_with_own_data_are_a_table_with_their_mean_by_tokens() -> None:
    progress = RunProgress()
    progress.take(started(names={"1": "anna"}), 0.0)
    sites = {"0": events.Site(8, 2.0, 300_000, 0.5), "1": events.Site(4, 4.0, 100_000, 7.5)}
    alone = evaluated(8, 2.0, local_loss=1.5, sites={"0": sites["0"]}, sites_loss=2.0)
    assert progress.take(alone, 0.0).splitlines()[1:] == ["with the local parameters of this replica: 1.5000"]
    sites["2"] = events.Site(8, None, 1_000, 12.0)
    lines = progress.take(evaluated(8, 2.0, sites=sites, sites_loss=events.mean_loss(sites)), 0.0).splitlines()
    assert [line.split("  ")[0].strip() for line in lines[1:]] == [
        *("own data of", "replica 0", "anna", "replica 2", "mean by tokens")
    ]
    assert [line.split()[2:] for line in lines[2:5:2]] == [["2.0000", "300K", "0.5", "8"], ["-", "1.0K", "12.0", "8"]]
    assert len({len(line) for line in lines[1:]}) == 1, "columns"
    assert lines[-1].split() == ["mean", "by", "tokens", "2.5000"]


def test_a_void_round_is_worth_a_line_only_when_its_reason_changes() -> None:
    late = [
        void(replica, fragment, k, f"replica {slow} is late")
        for replica, fragment, k, slow in ((0, 0, 3, 2), (1, 0, 3, 2), (0, 1, 4, 2), (0, 0, 4, 1))
    ]
    joins = void(0, 1, 5, "replica 7 joins; replicas 1, 7 continue", view_changed=True)
    assert news(RunProgress(), *late, joins) == [True, False, False, True, False], "ViewChanged says who joins"


def test_clamped_values_and_skipped_steps_are_told_when_they_begin() -> None:
    saturated = [sent(0, fragment, n, saturated=True) for n, fragment in enumerate((0, 0, 1))]
    assert news(RunProgress(), sent(0, 0, 1), *saturated) == [False, True, False, True]
    skipped = [step(n, skipped_replicas=replicas) for n, replicas in enumerate((0, 2, 1, 0, 1), 1)]
    assert news(RunProgress(), *skipped) == [False, True, False, False, True]


def test_the_speed_counts_training_and_the_time_left_everything() -> None:
    progress = RunProgress()
    progress.take(started(total_steps=7), 0.0)
    for number, now_s in ((1, 10.0), (2, 11.0), (3, 14.0)):  # with a pause of two seconds
        took = step(number, step_s=number, tokens_per_s=100 / number, model_flops_utilization=0.1 * number)
        progress.take(took, now_s)
        assert (progress.recent("tokens_per_s") is None) == (progress.left_s is None) == (number == 1)
    assert (progress.recent("tokens_per_s"), progress.left_s) == (200 / 5, 8.0)
    assert progress.recent("model_flops_utilization") == pytest.approx((2 * 0.2 + 3 * 0.3) / 5), "by their time"
    assert progress.recent("sent_bytes") == 3000


def test_the_time_left_knows_that_steps_after_the_shared_start_exchange_no_gradients() -> None:
    """Here a shared step takes 10 s, of which 1 s is its computation: the run of 104 steps takes 120 s, not 1,020."""
    progress = RunProgress()
    progress.take(started(total_steps=104, shared_start_steps=4), 0.0)
    left = []
    for number, now_s in ((1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0), (5, 41.5), (6, 43.0)):
        progress.take(step(number, compute_utilization=0.1), now_s)
        left.append(progress.left_s)
    assert left == [None, 20.0 + 100.0, 10.0 + 100.0, 100.0, 1.5 * 99, 1.5 * 98]


def test_the_loss_is_a_mean_of_the_last_finite_ones_unless_the_last_is_not_finite() -> None:
    progress = RunProgress()
    shown = []
    for number, loss in enumerate((1.0, math.nan, 2.0), 1):
        progress.take(step(number, loss), 0.0)
        shown.append(progress.loss)
    assert shown == [1.0, pytest.approx(math.nan, nan_ok=True), 1.5]


def change(cause: str = "other", **fields: tuple[int, ...]) -> events.ViewChanged:
    names = {"100200300": "anna-pc", "100200301": "bob"}
    return view(2, **{"members": (1, 100200300), "cause": cause, "names": names, **fields})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            change("unreachable", left=(100200301,), lost=(100200301,)),
            "bob is gone (the connection ended and can't be reopened); 2 replicas continue",
        ),
        (
            change("left", left=(100200301, 7), joined=(100200300,)),
            "replica 7, bob have left; anna-pc joined; 2 replicas continue",
        ),
        (change("late", left=(7, 8), lost=(7, 8), members=(1,)), "replicas 7, 8 are gone (late); 1 replica continues"),
        (change("joins", left=(7,), lost=(7,)), "replica 7 is gone; 2 replicas continue"),
        (change("interrupted"), "the replicas connect again (a connection was interrupted); 2 replicas"),
        (change(), "the replicas connect again; 2 replicas"),
    ],
)
def test_a_change_of_members_is_one_sentence_with_names(changed: events.ViewChanged, words: str) -> None:
    assert RunProgress().take(changed, 0.0) == words
