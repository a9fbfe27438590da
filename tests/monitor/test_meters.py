import math

import pytest

from diloco.monitor.meters import Ema, Throughput


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
    for step in range(4):
        speed.update(100.0 * step, steps=step, tokens=50 * step)
    assert speed.tokens_per_s == 0.5
    assert speed.eta_s(5) == 200.0


def test_pauses_do_not_slow_the_rate_and_do_count_in_the_time_left() -> None:
    speed = Throughput()
    speed.update(0.0, steps=1, tokens=100)
    speed.skip(7.0)
    speed.skip(10.0)
    speed.update(12.0, steps=2, tokens=200)
    assert speed.tokens_per_s == 50.0
    # two seconds of training and ten of pause for one step
    assert speed.eta_s(3) == 12.0
    assert speed.eta_s(2) == 0.0
    assert speed.eta_s(1) == 0.0
