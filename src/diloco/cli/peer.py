"""``diloco train --transport hivemind``: one replica of a swarm."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from diloco.config.run_plan import CONFIG_FILE, RunPlan

__all__ = ["train_peer"]


def train_peer(plan: RunPlan, folder: Path) -> int:
    """Take part in the run that the settings name, until it is over or a signal asks this replica to leave."""
    from diloco.cli.train import continue_record
    from diloco.cli.watching import watch
    from diloco.train.fleet.connecting import connect_peer
    from diloco.train.fleet.swarm_fleet import SwarmFleet
    from diloco.train.joining import OVER
    from diloco.train.run import run_training

    settings = plan.configuration
    if plan.source is not None and (folder / CONFIG_FILE).exists():
        continue_record(plan, plan.source, folder)

    notes = list(plan.notes)

    def meet(facts: Mapping[str, str], own: Path) -> SwarmFleet:
        fleet = connect_peer(settings, own, facts)
        notes.extend(fleet.beginning())
        for line in fleet.invitation():
            print(line, file=sys.stderr, flush=True)
        return fleet

    sink = watch(settings, folder)
    try:
        summary = run_training(settings, folder=folder, sink=sink, config_toml=plan.record, notes=notes, meet=meet)
    finally:
        sink.close()
    return 0 if summary["interrupted"] in (None, OVER) else 130
