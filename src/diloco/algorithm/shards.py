"""The parts of a sum that the replicas own in a reduce-scatter: equal ones, or smaller ones for slow uplinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum

__all__ = ["MOST_SHARE", "UNKNOWN_UPLINK", "Uplink", "owned_shares", "shard_bounds", "speeds"]

MOST_SHARE = 2.0
"""The most that a replica owns, in equal shares: the others can't check the mean that an owner sends."""

_HALVINGS = 60


@dataclass(frozen=True)
class Uplink:
    """What a replica knows about the bandwidth with which it sends.

    >>> Uplink(20_000_000, full=True)    # it can't send faster than 20 Mbit/s
    Uplink(bits_per_s=20000000, full=True)
    """

    bits_per_s: int = 0  # the highest rate measured; 0: none
    full: bool = False  # whether the uplink was full at that rate


UNKNOWN_UPLINK = Uplink()


def speeds(uplinks: Sequence[Uplink]) -> list[float]:
    """Return the rates at which replicas are assumed to send; empty if no uplink is known to have been full.

    One whose uplink was never full is among the fastest.

    >>> speeds([Uplink(20, full=True), Uplink(90), Uplink(), Uplink(70, full=True)])
    [20.0, 90.0, 90.0, 70.0]
    >>> speeds([Uplink(20), Uplink(90), Uplink(0, full=True)])
    []
    """
    if not any(each.full and each.bits_per_s for each in uplinks):
        return []
    fastest = float(max(each.bits_per_s for each in uplinks))
    return [float(each.bits_per_s) if each.full and each.bits_per_s else fastest for each in uplinks]


def owned_shares(rates: Sequence[float], payload_bytes: float, mean_bytes: float) -> list[float]:
    """Return the share of the sum that each replica should own so that the slowest is done soonest.

    The replica at position i has the share s_i. It sends ``(1 - s_i) n + (M - 1) s_i m`` and receives
    ``(M - 1) s_i n + (1 - s_i) m``, where n is the payload and m the encoded mean of all values. T is the least time in
    which all replicas can do both, at their rates, with s_i at most `MOST_SHARE` / M. What T leaves open is shared out
    in proportion. Every operation is correctly rounded (`sum` is not, in some versions of Python), so every machine
    gets the same bits.

    Args:
        rates: the rates of the replicas, positive, in any unit; a downlink is assumed to be as fast as the uplink.
        payload_bytes: n.
        mean_bytes: m.

    >>> [round(share, 3) for share in owned_shares([1, 1, 1, 1], 1.0, 1.0)]
    [0.25, 0.25, 0.25, 0.25]
    >>> [round(share, 3) for share in owned_shares([1, 5, 5], 1.0, 1.0)]
    [0.0, 0.5, 0.5]
    """
    replicas = len(rates)
    sent, received = (payload_bytes, (replicas - 1) * mean_bytes), (mean_bytes, (replicas - 1) * payload_bytes)

    def limits(time: float) -> list[tuple[float, float]]:
        """Return the least and the greatest share with which each replica is done in ``time``."""
        found = []
        for rate in rates:
            least, greatest = 0.0, MOST_SHARE / replicas
            for as_none, as_only in (sent, received):  # the bytes with a share of 0, and with a share of 1
                if as_only > as_none:
                    greatest = min(greatest, (time * rate - as_none) / (as_only - as_none))
                elif as_only < as_none:
                    least = max(least, (as_none - time * rate) / (as_none - as_only))
            found.append((least, greatest))
        return found

    def enough(time: float) -> bool:
        found = limits(time)
        possible = all(least <= greatest for least, greatest in found)
        return possible and fsum(least for least, _ in found) <= 1 <= fsum(greatest for _, greatest in found)

    low, high = 0.0, 2 * (payload_bytes + mean_bytes) / min(rates)  # equal shares take less
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    found = limits(high)
    left_open = fsum(greatest - least for least, greatest in found)
    part = (1 - fsum(least for least, _ in found)) / left_open if left_open else 0.0
    return [least + part * (greatest - least) for least, greatest in found]


def shard_bounds(
    numel: int, num_replicas: int, block_size: int, shares: Sequence[float] = ()
) -> tuple[tuple[int, int], ...]:
    """Divide ``numel`` values into ``num_replicas`` consecutive ranges and return their ``(start, stop)``.

    Ranges consist of whole blocks. Without ``shares`` they differ by at most one block: with fewer blocks than replicas
    some are empty, and the last range, which holds the last, perhaps shorter block, is one of those with the most
    blocks, so no other division into whole blocks has a shorter longest range.

    Args:
        shares: the share of each replica, which add up to 1; empty: equal shares.

    >>> shard_bounds(10, 3, block_size=1)
    ((0, 3), (3, 6), (6, 10))
    >>> shard_bounds(1000, 3, block_size=256)
    ((0, 256), (256, 512), (512, 1000))
    >>> shard_bounds(300, 3, block_size=256)
    ((0, 0), (0, 256), (256, 300))
    >>> shard_bounds(1000, 3, block_size=256, shares=[0, 0.5, 0.5])
    ((0, 0), (0, 512), (512, 1000))
    """
    blocks = -(-numel // block_size)
    ends = [position * blocks // num_replicas for position in range(1, num_replicas)]
    if shares:
        ends = [min(blocks, round(blocks * each)) for each in accumulate(shares[:-1])]
    return tuple(pairwise([0, *(min(end * block_size, numel) for end in ends), numel]))
