"""What a command of several processes shows and writes of each of them."""

from __future__ import annotations

import dataclasses
import platform
import sys
from pathlib import Path
from typing import Any

from diloco.config.configuration import Configuration
from diloco.config.keys import flatten
from diloco.monitor.sinks import About, Sinks, make_sinks
from diloco.train.roles import Role

__all__ = ["watch"]


def watch(configuration: Configuration, folder: Path, role: Role | None = None) -> Sinks:
    """The sinks of the process that trains in ``folder``.

    Args:
        configuration: of the run.
        folder: of this process.
        role: which of the processes it is; None: all replicas are in it, or it is a peer of a swarm.

    Raises:
        ConfigurationError: for settings that cannot work, before anything is written.
    """
    monitor, about = configuration.monitor, about_run(configuration, folder, role)
    if role is not None and (role.position or (role.replica and monitor.wandb.replicas == "first")):
        monitor = dataclasses.replace(monitor, wandb=dataclasses.replace(monitor.wandb, mode="off"))
    return make_sinks(monitor, folder, is_terminal=sys.stdout.isatty(), about=about)


def about_run(configuration: Configuration, folder: Path, role: Role | None = None) -> About:
    """How a tracker elsewhere shall tell this process from others: one run in one process, a group of several."""
    wandb, group = configuration.monitor.wandb, None
    name = wandb.name or folder.resolve().name
    if role is not None:
        home = folder.resolve()
        home = home.parent if role.position else home
        home = home.parent if role.replica else home
        group = wandb.name or home.name
        name = f"{group}-replica-{role.replica}" if role.replica else group
    elif configuration.transport.name == "hivemind":
        group = configuration.swarm.run
        name = f"{name}-{platform.node()}"
    return About(name=name, group=wandb.group or group, config=_by_section(configuration))


def _by_section(configuration: Configuration) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in flatten(configuration).items():
        *sections, leaf = key.split(".")
        inside = table
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[leaf] = value
    return table
