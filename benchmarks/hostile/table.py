"""All attacks, in the order of the table."""

from __future__ import annotations

from benchmarks.hostile import donors, doors, files, members, records, strangers, swarm
from benchmarks.hostile.attack import Attack

__all__ = ["ATTACKS"]

ATTACKS: list[Attack] = [
    *members.ATTACKS,
    *strangers.ATTACKS,
    *doors.ATTACKS,
    *donors.ATTACKS,
    *records.ATTACKS,
    *files.ATTACKS,
    *swarm.ATTACKS,
]
