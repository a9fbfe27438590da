"""The environment that a run trains in, as plain values for ``environment.json``."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe_environment"]

_PACKAGES = ("diloco", "torch", "numpy", "safetensors", "tokenizers", "xxhash")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, processor and git commit as plain values; an unknown value is None."""
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "threads": torch.get_num_threads(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed": bool(_git("status", "--porcelain")),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache  # the running code is what was imported, whatever happens to the checkout later
def _git(*arguments: str) -> str | None:
    """Return the output of a git command in this package's own checkout, or None outside of one."""
    here = Path(__file__).resolve().parent
    try:
        # an installed copy may lie inside the checkout of another project
        subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True, check=True)
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
