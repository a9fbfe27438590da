"""The known names nearest to an unknown key or flag."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from diloco.config.keys import Key

__all__ = ["nearest_flags", "nearest_key"]


def nearest_key(given: str, known: Mapping[str, Key], *, is_section: bool = False) -> str:
    """Return a sentence with the key nearest to ``given``, from its own section or else from all sections.

    For a section, the nearest section is tried first.

    >>> from diloco.config import keys_of
    >>> from diloco.train.settings import RunSettings
    >>> nearest_key("train.stesp", keys_of(RunSettings))
    "did you mean 'train.steps'?"
    >>> nearest_key("network.inner_step", keys_of(RunSettings))
    "did you mean 'sync.inner_steps'?"
    >>> nearest_key("checkpoint.colour", keys_of(RunSettings))
    '[checkpoint] has: every_steps, keep, resume.'
    """
    section, _, leaf = given.rpartition(".")
    leaf = leaf.replace("-", "_")
    siblings = {key.leaf: key.name for key in known.values() if key.section == section}
    everywhere = {key.leaf: key.name for key in reversed(list(known.values()))}
    sections = {key.section: f"[{key.section}]" for key in known.values() if key.section}
    for choices in (sections, siblings, everywhere) if is_section else (siblings, everywhere, sections):
        close = difflib.get_close_matches(leaf, choices, n=1, cutoff=0.7)
        if close:
            return f"did you mean {choices[close[0]]!r}?"
    if siblings and section:
        return f"[{section}] has: {', '.join(sorted(siblings))}."
    return f"the sections are: {', '.join(sorted(sections.values()))}."


_COMMON = {
    **dict.fromkeys(("epochs", "iters", "iterations"), "steps"),
    **dict.fromkeys(("gpus", "nproc", "nproc-per-node", "world-size", "workers", "nodes", "m"), "replicas"),
    **dict.fromkeys(("output", "output-dir", "outdir", "dir", "save-dir"), "out"),
    **dict.fromkeys(("dataset", "input", "corpus"), "data"),
    **dict.fromkeys(("wd", "weight-decay", "betas"), "optimizer.arguments"),
    **dict.fromkeys(("rank", "local-rank"), "replica"),
    **dict.fromkeys(("h", "sync-every", "sync-steps"), "inner-steps"),
    **dict.fromkeys(("dtype", "bf16"), "precision"),
    **dict.fromkeys(("ctx", "context-length", "block-size"), "sequence-length"),
    **{"run-name": "run", "p": "fragments", "tau": "overlap-steps", "cuda": "device", "gpu": "device"},
    **{"grad-clip": "optimizer.clip-norm", "momentum": "outer-momentum"},
    **dict.fromkeys(("wandb", "tensorboard", "report-to"), "sinks"),
    **{"lora": "lora-rank", "val-split": "data.heldout-fraction", "hidden-size": "model.arguments"},
}
"""Names that other programs use, and symbols of the papers -> the end of the flag that is meant here."""

_LONG = {
    **{"lr": "learning-rate", "bs": "batch-size", "seq": "sequence", "len": "length", "eval": "evaluation"},
    **{"save": "checkpoint", "ckpt": "checkpoint", "num": "", "max": "", "total": "", "n": ""},
}
"""Parts of names -> what is written for them here."""


def nearest_flags(word: str, flags: Sequence[str]) -> list[str]:
    """Return the flags that are probably meant by an unknown one, at most three.

    >>> flags = ["--learning-rate", "--outer-learning-rate", "--run", "--steps", "--batch-size"]
    >>> [nearest_flags(word, flags) for word in ("--lr", "--batchsize", "--max-steps", "--zz")]
    [['--learning-rate'], ['--batch-size'], ['--steps'], []]
    """
    section, _, leaf = word.lstrip("-").replace("_", "-").lower().rpartition(".")
    meant = _COMMON.get(leaf, leaf)
    words = _parts("-".join([section, *(_LONG.get(part, part) for part in _parts(meant))])) or [leaf]
    if not section:  # the short flag, if there is one
        short = {flag.lstrip("-") for flag in flags if "." not in flag}
        flags = [flag for flag in flags if "." not in flag or flag.rpartition(".")[2] not in short]

    def likeness(flag: str) -> float:
        ours, end = _parts(flag), _parts(flag.rpartition(".")[2])
        typed = sum(max(_alike(each, part) for part in ours) for each in words) / len(words)
        covered = sum(max(_alike(each, part) for each in words) for part in end) / len(end)
        return max((typed + covered) / 2, _alike("".join(words), "".join(ours if section else end)))

    scores = {flag: round(likeness(flag), 3) for flag in flags}
    best = max(scores.values(), default=0.0)
    return [flag for flag, score in scores.items() if score == best > 0.55][:3]


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"[-.]", name) if part]


def _alike(one: str, other: str) -> float:
    ratio = difflib.SequenceMatcher(None, one, other).ratio()
    return ratio if ratio >= 0.75 else 0.0
