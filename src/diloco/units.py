"""What people read: quantities, tables of text, untrusted text, and what differs between two sides.

Scales are decimal (1 MB = 1000 kB = 1,000,000 bytes). Values below 100 have one decimal and larger ones none, so that
the width of a column stays the same as a value grows.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from diloco.errors import ConfigurationError


def visible(text: str, most: int = 200) -> str:
    r"""Make untrusted text safe for a terminal or a log: one line, no control characters, at most ``most`` characters.

    Characters that do not print (escapes, line ends, bidirectional overrides) are replaced by their escape codes.

    >>> visible("\x1b[31mred\nand a line of its own")
    '\\x1b[31mred\\nand a line of its own'
    >>> visible("x" * 60_000, 8)
    'xxxxx...'
    """
    shown = _escaped(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def visible_lines(text: str) -> str:
    r"""Escape untrusted text as `visible` does, but keep line ends, tabs and what people write, at any length.

    >>> visible_lines("a\tb\n\x1b[2Jc\r\u202ed")
    'a\tb\n\\x1b[2Jc\\r\\u202ed'
    """
    return _escaped(text, but="\n\t" + _WRITTEN)


def diff(mine: Mapping[str, Any], theirs: Mapping[str, Any], us: str, them: str, names: Collection[str] = ()) -> str:
    """Return the first difference between what two sides are, among ``names`` (none: all), or "" if there is none.

    Of values that are lists separated by "; " it names the items that only one side has. `GOES_ON` fits any value.

    >>> diff({"codec": "fp4", "seed": "0"}, {"codec": "int8"}, "replica 0", "replica 1")
    'replica 0 has codec = fp4 and replica 1 has codec = int8'
    >>> diff({"buffers": "a; b; c"}, {"buffers": "a; c"}, "the checkpoint", "this run")
    'the checkpoint has buffers = b and this run has buffers = none of these'
    """
    for name in names or dict.fromkeys([*mine, *theirs]):
        values = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if values[0] != values[1] and GOES_ON not in values:
            here, there = map(str, values)
            only_here, only_there = _items_without(here, there), _items_without(there, here)
            if only_here or only_there:
                here, there = only_here or "none of these", only_there or "none of these"
            fact, here, there = (visible(text, _MAX_FACT) for text in (name, here, there))
            return f"{us} has {fact} = {here} and {them} has {fact} = {there}"
    return ""


def _items_without(text: str, other: str) -> str:
    """Return the items of a list separated by "; " that another list lacks."""
    left_out = set(other.split("; "))
    return "; ".join(item for item in dict.fromkeys(text.split("; ")) if item not in left_out)


GOES_ON = "those of a run that goes on"
"""What a side says of itself that need not be as at the start of the run."""

_MAX_FACT = 500

_WRITTEN = "\xa0\u2009\u200a\u202f\u3000\u200c\u200d"
"""Spaces of French and Chinese, and joiners of Persian, Hindi and emoji: no terminal obeys them."""


def _escaped(text: str, but: str = "") -> str:
    if text.isprintable():
        return text
    shown = []
    for character in text:
        is_shown = character.isprintable() or character in but
        shown.append(character if is_shown else character.encode("unicode_escape").decode())
    return "".join(shown)


_MAX_CELL = 10_000  # characters; a cell is one line, so that no text can pose as another


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a header. The first column is left-aligned, the others are right-aligned.

    >>> print(columns(["name", "layers"], [["tiny", "4"], ["150m", "12"]]))
    name  layers
    tiny       4
    150m      12
    """
    header, *rows = ([visible(cell, _MAX_CELL) for cell in row] for row in (header, *rows))
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *rest in (header, *rows):
        cells = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]))
    return "\n".join(lines)


def in_short(names: Sequence[str]) -> str:
    """Name the first three, and how many others there are.

    >>> in_short(["a", "b"]), in_short(list("abcde"))
    ('a, b', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def facts_table(facts: Mapping[str, str]) -> str:
    """Return a line for each fact: its name, then the fact.

    >>> print(facts_table({"model": "150m", "replicas": "4"}))
    model     150m
    replicas  4
    """
    cells = {visible(name): visible(fact, _MAX_CELL) for name, fact in facts.items()}
    width = max(map(len, cells), default=0)
    return "\n".join(f"{name:{width}}  {fact}" for name, fact in cells.items())


def perplexity(loss: float) -> float:
    """Return ``exp(loss)`` for a loss in nats per token, or infinity on overflow.

    >>> perplexity(0.0), perplexity(1e9)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def format_bytes(count: float) -> str:
    """Format a number of bytes with a decimal unit: 1 MB is 1,000,000 bytes.

    >>> [format_bytes(count) for count in (0, 999, 1000, 12_345_678, 999_960, 4.4e9)]
    ['0 B', '999 B', '1.0 kB', '12.3 MB', '1.0 MB', '4.4 GB']
    """
    return _scaled(count, (" B", " kB", " MB", " GB", " TB", " PB"))


def format_count(count: float) -> str:
    """Format a number with K, M, B (10^9) or T.

    >>> [format_count(count) for count in (0, 512, 1000, 1_086_720, 150e6, 2e12)]
    ['0', '512', '1.0K', '1.1M', '150M', '2.0T']
    """
    return _scaled(count, ("", "K", "M", "B", "T"))


def format_perplexity(value: float) -> str:
    """Format a perplexity with two decimals, or as a rounded count from 1000 on, so that columns keep their width.

    >>> format_perplexity(19.8312), format_perplexity(49_020.8), format_perplexity(float("inf"))
    ('19.83', '49.0K', 'inf')
    """
    return f"{value:.2f}" if value < 999.5 else format_count(value)


def format_ratio(ratio: float) -> str:
    """Format a ratio of at least 1 with two or three significant digits.

    >>> [format_ratio(ratio) for ratio in (412.4, 12.3, 3.14159, 1.04, 51_234)]
    ['412x', '12x', '3.1x', '1.04x', '51,234x']
    """
    decimals = 2
    if ratio >= 1.95:
        decimals = 0 if ratio >= 9.95 else 1
    return f"{ratio:,.{decimals}f}x"


def format_duration(seconds: float) -> str:
    """Format seconds in their one or two largest units, in at most six characters below 100 days.

    >>> [format_duration(seconds) for seconds in (0, 0.0002, 0.25, 8.34, 9.96, 59.7, 3599.6, 11_220, 187_000)]
    ['0s', '200us', '250ms', '8.3s', '10s', '1m00s', '1h00m', '3h07m', '2d03h']
    """
    if not math.isfinite(seconds):
        return str(seconds)
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if 0 < scale * seconds < 999.5:
            return f"{scale * seconds:.0f}{unit}"
    if 0 < seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for large, unit, small, rest in ((86_400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= large:
            return f"{whole // large}{unit}{whole % large // small:02d}{rest}"
    return f"{whole}s"


def format_rate(bits_per_s: float) -> str:
    """Format bits per second with three significant digits and a decimal unit.

    >>> [format_rate(rate) for rate in (512, 94.3e6, 1e9, 1.25e12)]
    ['512 bit/s', '94.3 Mbit/s', '1 Gbit/s', '1.25 Tbit/s']
    """
    units = {"Tbit/s": 1e12, "Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3}
    for unit, size in units.items():
        if bits_per_s >= 0.9995 * size:
            return f"{bits_per_s / size:.3g} {unit}"
    return f"{bits_per_s:.3g} bit/s"


if TYPE_CHECKING:
    Duration = float
    Rate = float
else:

    class _Measure(float):
        def __str__(self) -> str:
            """Return the value in the largest unit in which it is at least 1 and exact."""
            for unit, size in self.units:
                text = f"{round(self / size, 9):.9f}".rstrip("0").rstrip(".")
                if self >= size and float(text) * size == self:
                    return f"{text}{unit}"
            return f"{float(self)!r}{next(unit for unit, size in self.units if size == 1.0)}"

    class Duration(_Measure):
        """Seconds, in settings. It is written, and has to be typed, with a unit.

        >>> str(Duration(0.02)), str(Duration(90)), str(Duration(600)), Duration(1.5) + 1
        ('20ms', '1.5min', '10min', 2.5)
        """

        units = ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)

    class Rate(_Measure):
        """Bits per second, as `Duration`.

        >>> str(Rate(1e8)), str(Rate(1.5e9))
        ('100Mbit', '1.5Gbit')
        """

        units = ("Tbit", 1e12), ("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3), ("bit", 1.0)


class Quantity(NamedTuple):
    """A kind of number that `parse` reads."""

    units: Mapping[str, float]  # unit in small letters -> its size
    expected: str  # what is valid, to follow "must be"
    least: float = 0.0
    below: float = math.inf


DURATION = Quantity(
    {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0},
    "a number with us, ms, s, min, h or d, such as '80ms'",
)
"""Seconds."""
RATE = Quantity(
    {
        f"{scale}{unit}": size
        for scale, size in (("", 1.0), ("k", 1e3), ("m", 1e6), ("g", 1e9), ("t", 1e12))
        for unit in ("bit", "bit/s", "bps", "bits/s")
    },
    "a number with kbit, Mbit, Gbit or Tbit, such as '500Mbit'",
)
"""Bits per second."""
BYTES = Quantity(
    {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}, "a positive number of kB, MB, GB or TB, such as 500MB", 0.5
)
COUNT = Quantity(
    {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12},
    "a positive number, optionally with K, M, B or T",
    0.5,
)
PERCENTAGE = Quantity({"": 1.0, "%": 1.0}, "a percentage below 100, such as 5%", below=100.0)


def parse(text: str, name: str, quantity: Quantity) -> float:
    """Parse a number with a unit. A unit is required, unless ``quantity`` has the unit "".

    Raises:
        ConfigurationError: ``text`` is not valid; ``name`` is the option that it was given for.

    >>> parse("80ms", "--latency", DURATION), parse("1.5h", "--away", DURATION), parse("1 Gbit/s", "--bandwidth", RATE)
    (0.08, 5400.0, 1000000000.0)
    >>> parse("1.5 GB", "--size", BYTES), parse("1.1B", "--parameters", COUNT), parse("99.5", "--loss", PERCENTAGE)
    (1500000000.0, 1100000000.0, 99.5)
    >>> parse("500MB", "--bandwidth", RATE)
    Traceback (most recent call last):
    diloco.errors.ConfigurationError: --bandwidth must be a number with kbit, Mbit, Gbit or Tbit, such as ...
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z/%]*)\s*", text.lower())
    number = math.inf
    if match is not None and match[2] in quantity.units:
        number = float(match[1]) * quantity.units[match[2]]
    if not quantity.least <= number < quantity.below:
        raise ConfigurationError(f"{name} must be {quantity.expected}; got {text!r}.")
    return number


def _scaled(count: float, units: tuple[str, ...]) -> str:
    index = 0
    # 999.5 would be rounded to 1000, which is shorter in the next unit
    while math.isfinite(count) and abs(count) >= 999.5 and index < len(units) - 1:
        count, index = count / 1000, index + 1
    decimals = 1 if index and abs(count) < 99.95 else 0
    return f"{count:.{decimals}f}{units[index]}"
