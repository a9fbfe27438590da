"""The keys of a settings dataclass as dotted names, which TOML files, flags and comparisons share.

Settings are nested dataclasses (``RunSettings.train.steps``). A key is the path to a leaf (``"train.steps"``), and
`Values` maps keys to values. Layers of values are merged as dictionaries. Only the result becomes a dataclass, so that
the checks of the settings see only final values.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

__all__ = ["Key", "Values", "build", "flatten", "keys_of", "nearest_flags", "nearest_key"]

Values = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting."""

    name: str  # dotted path, such as ``train.steps``
    annotation: Any  # type, without the `Annotated` around it
    help: str  # docstring of the field, on one line
    default: Any
    aliases: tuple[str, ...] = ()  # short flags in addition to ``--train.steps``

    @property
    def section(self) -> str:
        """``"train"`` for ``train.steps``; empty for a top-level key."""
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        """``"steps"`` for ``train.steps``."""
        return self.name.rpartition(".")[2]


def keys_of(settings_type: type[Any]) -> dict[str, Key]:
    """Return all keys of a settings dataclass by name: top-level keys first, then section by section.

    >>> from diloco.train.settings import RunSettings
    >>> keys_of(RunSettings)["train.stop_after"].aliases
    ('--stop-after',)
    """
    if settings_type not in _KEYS:
        _KEYS[settings_type] = _collect(settings_type)
    return _KEYS[settings_type]


# Not functools.cache: a type checker does not take a class for hashable.
_KEYS: dict[type[Any], dict[str, Key]] = {}


def _collect(settings_type: type[Any]) -> dict[str, Key]:
    top: dict[str, Key] = {}
    nested: dict[str, Key] = {}
    hints = get_type_hints(settings_type, include_extras=True)
    documentation = _field_docstrings(settings_type)
    for field in dataclasses.fields(settings_type):
        annotation: Any = hints[field.name]
        metadata: tuple[Any, ...] = ()
        if get_origin(annotation) is Annotated:
            annotation, metadata = get_args(annotation)[0], get_args(annotation)[1:]
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            for key in keys_of(annotation).values():
                nested[f"{field.name}.{key.name}"] = dataclasses.replace(key, name=f"{field.name}.{key.name}")
            continue
        aliases = [alias for entry in metadata for alias in getattr(entry, "aliases", None) or ()]
        top[field.name] = Key(
            name=field.name,
            annotation=annotation,
            help=documentation.get(field.name, ""),
            default=field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
            aliases=tuple(aliases),
        )
    return {**top, **nested}


def flatten(settings: Any) -> Values:
    """Return every key of a settings dataclass with its value."""
    values: Values = {}
    for name in keys_of(type(settings)):
        values[name] = functools.reduce(getattr, name.split("."), settings)
    return values


def build(settings_type: type[T], values: Mapping[str, Any]) -> T:
    """Return the settings with ``values``, and the defaults for all other keys.

    Raises:
        ConfigurationError: from the settings' own checks.
    """
    arguments: dict[str, Any] = {}
    sections: dict[str, Values] = {}
    for name, value in values.items():
        section, _, rest = name.partition(".")
        if rest:
            sections.setdefault(section, {})[rest] = value
        else:
            arguments[name] = value
    hints = get_type_hints(settings_type)
    return settings_type(**arguments, **{name: build(hints[name], rest) for name, rest in sections.items()})


def nearest_key(given: str, known: Mapping[str, Key], *, is_section: bool = False) -> str:
    """Return a sentence with the key nearest to ``given``, from its own section or else from all sections.

    For a section, the nearest section is tried first.

    >>> from diloco.train.settings import RunSettings
    >>> nearest_key("train.stesp", keys_of(RunSettings))
    "did you mean 'train.steps'?"
    >>> nearest_key("codec.inner_step", keys_of(RunSettings))
    "did you mean 'schedule.inner_steps'?"
    >>> nearest_key("codec.colour", keys_of(RunSettings))
    '[codec] has: arguments, block_size, error_feedback, error_feedback_decay, name.'
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
    **dict.fromkeys(("wd", "weight-decay", "betas"), "inner.arguments"),
    **dict.fromkeys(("rank", "local-rank"), "replica"),
    **dict.fromkeys(("h", "sync-every", "sync-steps"), "inner-steps"),
    **dict.fromkeys(("dtype", "bf16"), "train.precision"),
    **dict.fromkeys(("ctx", "context-length", "block-size"), "train.sequence-length"),
    **{"run-name": "run", "p": "fragments", "tau": "overlap-steps", "cuda": "device", "gpu": "device"},
    **dict.fromkeys(("wandb", "tensorboard", "report-to"), "sinks"),
    **{"grad-clip": "inner.clip-norm", "momentum": "outer.momentum"},
    **{"lora": "lora.rank", "val-split": "data.heldout-fraction", "hidden-size": "model.width"},
}
"""Names that other programs use, and symbols of the papers -> the end of the flag that is meant here."""

_LONG = {
    **{"lr": "learning-rate", "bs": "batch-size", "seq": "sequence", "len": "length", "eval": "evaluation"},
    **{"save": "checkpoint", "ckpt": "checkpoint", "num": "", "max": "", "total": "", "n": ""},
}
"""Parts of names -> what is written for them here."""


def nearest_flags(word: str, flags: Sequence[str]) -> list[str]:
    """Return the flags that are probably meant by an unknown one, at most three.

    >>> flags = ["--inner.learning-rate", "--outer.learning-rate", "--run", "--steps", "--train.batch-size"]
    >>> [nearest_flags(word, flags) for word in ("--lr", "--batchsize", "--max-steps", "--zz")]
    [['--inner.learning-rate', '--outer.learning-rate'], ['--train.batch-size'], ['--steps'], []]
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


def _field_docstrings(settings_type: type) -> dict[str, str]:
    """Return the string below each field of the class and of its base dataclasses."""
    found: dict[str, str] = {}
    for cls in reversed(settings_type.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        body = _class_bodies(cls.__module__).get(cls.__name__, [])
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match below:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        found[field.target.id] = " ".join(text.split())
    return found


@functools.cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
