import math

import pytest

from diloco.units import format_bytes, format_count, format_duration, format_perplexity, format_ratio


@pytest.mark.parametrize(
    ("count", "written"),
    [
        (999.4, "999 B"),
        (999.6, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (1e19, "10000 PB"),
    ],
)
def test_bytes_at_the_edges_of_their_units(count: float, written: str) -> None:
    assert format_bytes(count) == written


def test_counts_that_are_no_numbers_are_written_as_they_are() -> None:
    assert format_count(math.inf) == "inf"
    assert format_perplexity(math.nan) == "nan"
    assert format_duration(math.inf) == "inf"


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.9994, "999ms"),
        (0.9996, "1.0s"),
        (9.94, "9.9s"),
        (59.4, "59s"),
        (59.5, "1m00s"),
        (86_399.7, "1d00h"),
        (0, "0s"),
    ],
)
def test_durations_at_the_edges_of_their_units(seconds: float, written: str) -> None:
    assert format_duration(seconds) == written


@pytest.mark.parametrize(
    ("ratio", "written"), [(1.006, "1.01x"), (1.949, "1.95x"), (1.96, "2.0x"), (9.94, "9.9x"), (9.96, "10x")]
)
def test_ratios_at_the_edges_of_their_digits(ratio: float, written: str) -> None:
    assert format_ratio(ratio) == written
