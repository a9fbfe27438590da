"""Unknown names of keys and flags: what replaces an old one, or the known name that is nearest."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path

from diloco.errors import ConfigurationError

_NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text("utf-8"))

RENAMED: dict[str, str] = {
    **dict.fromkeys(_NAMES["gone"], ""),
    **{old: f"{new}.{old.rpartition('.')[2]}" for new, keys in _NAMES["moved"].items() for old in keys},
    **_NAMES["renamed"],
}
"""Key or short flag of versions before 0.6 -> the new key, or what else replaces it; empty if nothing does."""


class OldKeyError(ConfigurationError):
    """A key of a version before 0.6."""


def replacement(name: str, command: str = "") -> str | None:
    """Return what to say about an old key, or about an old flag (with dashes in front); None if it is none.

    Args:
        command: the command that has the flag.

    >>> replacement("inner.learning_rate"), replacement("--transport.no-pace")
    ('it is now optimizer.learning_rate.', 'it is gone: nothing has to be set.')
    >>> replacement("--start-replicas"), replacement("train.steps")
    ('it is now --network.replicas.', None)
    """
    key = name.lstrip("-").replace(".no-", ".")
    new = _NAMES["commands"].get(command, {}).get(key.partition(".")[0])
    if new is None:
        new = RENAMED.get(key.replace("-", "_"))
        if new and name.startswith("--") and "." in new.partition(" ")[0]:
            new = f"--{new.replace('_', '-')}"
    return None if new is None else f"it is now {new}." if new else "it is gone: nothing has to be set."


def nearest_key(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the key or section nearest to ``name``, or with all keys of its section.

    >>> known = ["train.steps", "sync.inner_steps", "checkpoint.keep", "checkpoint.resume"]
    >>> nearest_key("train.stesp", known), nearest_key("network.inner_step", known)
    ("did you mean 'train.steps'?", "did you mean 'sync.inner_steps'?")
    >>> nearest_key("checkpoint.colour", known)
    '[checkpoint] has: keep, resume.'
    """
    section, _, leaf = name.rpartition(".")
    parts = [(key, *key.rpartition(".")[::2]) for key in known]
    siblings = {end: key for key, group, end in parts if group == section}
    sections = {group: f"[{group}]" for _, group, _ in parts if group}
    choices = {end: key for key, _, end in parts} | sections | siblings
    close = difflib.get_close_matches(leaf.replace("-", "_"), choices, n=1, cutoff=0.7)
    if close:
        return f"did you mean {choices[close[0]]!r}?"
    if siblings and section:
        return f"[{section}] has: {', '.join(sorted(siblings))}."
    return f"the sections are: {', '.join(sorted(sections.values()))}."


def nearest_flag(word: str, flags: Iterable[str]) -> str | None:
    """Return the flag that is probably meant by an unknown one, which may come from another program.

    >>> flags = ["--learning-rate", "--outer-learning-rate", "--run", "--train.steps", "--steps", "--batch-size"]
    >>> [nearest_flag(word, flags) for word in ("--lr", "--batchsize", "--max-steps", "--train.stesp", "--zz")]
    ['--learning-rate', '--batch-size', '--steps', '--train.steps', None]
    """
    section, dot, leaf = word.lstrip("-").replace("_", "-").lower().rpartition(".")
    meant = next((flag for flag, others in _NAMES["elsewhere"].items() if leaf in others), leaf)
    meant = "-".join(filter(None, (_NAMES["parts"].get(part, part) for part in meant.split("-")))) or leaf
    names: dict[str, str] = {}
    for flag in sorted(flags, key=lambda flag: "." in flag):  # short ones first
        names |= {flag[2:]: flag} | {flag[2:].rpartition(".")[2]: flag} | names
    close = difflib.get_close_matches(f"{section}{dot}{meant}", names, n=1)
    return names[close[0]] if close else None
