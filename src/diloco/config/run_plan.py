"""The plan of the run that a command line of `diloco train` asks for, and the commands that join and resume it.

The commands are made from the resolved settings and not from what was typed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco import __version__
from diloco.config.configuration import (
    FINETUNE,
    Configuration,
    asked_values,
    compose,
    layered,
    preset_values,
    tokenizer_of_weights,
)
from diloco.config.flags import CommandLine, command_text
from diloco.config.keys import Values, build, flatten, in_toml, keys_of, read_toml, to_toml
from diloco.data import HUB_PREFIX, MAX_TOKENIZER_BYTES, TOKENIZER_NAME
from diloco.errors import ConfigurationError
from diloco.plugins import KEYS, absolute, confirm, is_own, own_code, same_code
from diloco.private_files import read_regular
from diloco.train import notes, resolve
from diloco.traits import Trait
from diloco.transport import TRANSPORTS

if TYPE_CHECKING:
    from diloco.data import Corpus

CONFIG_FILE = "config.toml"

_CODE_KEYS = [key for key in KEYS if key not in ("model.source", "monitor.sinks")]


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that is ready to start."""

    configuration: Configuration  # resolved, with absolute paths
    record: str  # text of ``config.toml``, without the settings of this process and this call
    source: Path | None  # run folder to resume from; None for a new run
    notes: Sequence[str]  # sentences for the user
    places: str = ""  # what the folder that it resumes names beside itself, as flags
    corpus: Corpus | None = None  # what its settings name, if it has been read already


def plan_run(line: CommandLine) -> RunPlan:
    """Return the plan for a command line. This function reads files but writes none."""
    resume = line.values.get("checkpoint.resume")
    if resume is not None:
        return _plan_resumed(line, Path(resume))
    configuration = _with_absolute_paths(compose_for_model(line))
    if (resume := configuration.checkpoint.resume) is not None:
        raise ConfigurationError(
            f"checkpoint.resume={resume!r} cannot be set in {line.file}: a resumed run takes its settings from its own "
            f"folder. Use `{command_text('train', flags={'--resume': resume})}`."
        )
    resolved = _resolved(configuration)
    told = (*_note_on_tokenizer(resolved), *notes(resolved))
    return RunPlan(configuration=resolved, record=_record(resolved), source=None, notes=told)


def _note_on_tokenizer(configuration: Configuration) -> list[str]:
    """Return a warning if the weights that a run begins from were trained with another tokenizer than is asked for."""
    asked, usual = configuration.data.tokenizer, tokenizer_of_weights(configuration)
    is_fresh = configuration.train.init_from is None and configuration.model.huggingface.weights == "fresh"
    if usual is None or is_fresh or _tokenizer_file(asked) == _tokenizer_file(usual):
        return []
    return [
        f"The weights that this run begins from were trained with the tokenizer {usual}, not with {asked}, whose ids "
        "they don't know."
    ]


def _tokenizer_file(name: str) -> str | bytes:
    """Return what tells a tokenizer apart: the content of its file, or its name."""
    path = Path(name.removeprefix(HUB_PREFIX)).expanduser()
    path = path / TOKENIZER_NAME if path.is_dir() else path
    return read_regular(path, MAX_TOKENIZER_BYTES) if path.is_file() else name


def compose_for_model(line: CommandLine) -> Configuration:
    """Return what `compose` does, with the longest sequence of the model where the default would be longer."""
    configuration = compose(line)
    if "train.sequence_length" in asked_values(line):
        return configuration
    _, longest = _layers_and_length(configuration)
    length = min(configuration.train.sequence_length, longest)
    return dataclasses.replace(configuration, train=dataclasses.replace(configuration.train, sequence_length=length))


def _layers_and_length(configuration: Configuration) -> tuple[int, int]:
    """Return the number of layers and the longest sequence of the model."""
    if configuration.model.source is None:
        model = configuration.model.decoder
        return model.layers, model.max_sequence_length
    from diloco.train import outline

    built = outline(configuration, 1024)  # without parameters; layers and positions don't depend on the vocabulary
    return built.num_layers, built.max_sequence_length


def _resolved(configuration: Configuration) -> Configuration:
    layers, longest = _layers_and_length(configuration)
    resolved = resolve(configuration, num_layers=layers, max_sequence_length=longest)
    if resolved.sync.arguments or any(is_own(operator.attrgetter(key)(resolved)) for key in _CODE_KEYS):
        from diloco.train import check_components

        check_components(resolved)
    return resolved


def _plan_resumed(line: CommandLine, resume: Path) -> RunPlan:
    """Plan to resume the run at ``resume``, with the few changes of settings that are allowed."""
    if line.file is not None:
        raise ConfigurationError(
            f"{line.file} cannot be given together with --resume {resume}: a resumed run takes its settings from its "
            "own folder. Leave the file out."
        )
    source, path = record_of(resume, line.values.get("network.replica"))
    settings = read_record(path)
    saved = flatten(settings)
    confirm(source, saved, line.values)
    places = {name: value for name, value in _chosen(settings).items() if name not in line.values}
    wanted = flatten(_with_absolute_paths(build(Configuration, layered(saved, line.values))))
    elastic = [TRANSPORTS[values["network.transport"]].elastic for values in (saved, wanted)]
    decided = {"network.replica_size"}
    if not all(elastic):
        decided.add("network.replicas")
    if any(elastic):  # a swarm divides the data in another way
        decided.add("network.transport")
    fixed = []
    for name in line.values:
        old, new = saved[name], wanted[name]
        is_same = same_code(new, old) or _may_have_moved(name, old, new)
        may_change = _has(name, Trait.CHANGEABLE) and name not in decided
        if not is_same and not may_change:
            fixed.append(f"{name} from {in_toml(old)} to {in_toml(new)}")
    if fixed:
        raise ConfigurationError(
            f"--resume {resume} cannot change {', '.join(fixed)}: the steps of a resumed run must compute the same. "
            f"Leave that out, or start a new run with --init-from {resume}."
        )
    before, after = saved["train.steps"], wanted["train.steps"]
    if after < before:
        raise ConfigurationError(f"--steps {after} is too few for a run planned for {before}: give {before} or more.")
    stretched = (
        f"train.steps changes from {before} to {after}: the learning-rate schedule now extends over {after} steps, and "
        f"the result differs from that of a run with {after} steps from the start."
    )
    # The checkpoint holds the parameters that the run started from; only the record keeps their name.
    resolved = _resolved(build(Configuration, wanted | {"train.init_from": None}))
    record = _record(build(Configuration, flatten(resolved) | {"train.init_from": saved["train.init_from"]}))
    told = (*([stretched] if after > before else []), *notes(resolved))
    named = command_text("train", flags=_flags(places)).removeprefix("diloco train").strip()
    return RunPlan(configuration=resolved, record=record, source=source, notes=told, places=named)


def _may_have_moved(name: str, before: Any, now: Any) -> bool:
    """Return whether a setting names another place where the same may lie, which the checkpoint decides when loaded."""
    if name == "model.source":
        return all(str(value).startswith("hf:") for value in (before, now))
    return name == "data.tokenizer" and not {before, now} & {"bytes", "bpe"}


def read_record(path: Path) -> Configuration:
    """Return the settings in the ``config.toml`` of a run.

    Raises:
        ConfigurationError: the file can't be read, or has other keys.
    """
    return build(Configuration, read_toml(path, Configuration))


def chosen_places(line: CommandLine) -> Values:
    """Return the places that a command line and its file choose, for a run that may have begun."""
    return _places(_with_absolute_paths(compose(line)))


def _places(settings: Configuration) -> Values:
    """Return the settings that name what a run reads, writes or listens at beside its folder, unless by default."""
    values, usual = flatten(settings), flatten(Configuration())
    places = [name for name, key in keys_of(Configuration).items() if key.is_place]
    names = [name for name in places if not _has(name, Trait.OF_CALL, Trait.OF_PROCESS)]
    return {name: values[name] for name in names if values[name] != usual[name]}


def check_fetched(url: str, path: Path, typed: Mapping[str, Any]) -> None:
    """Refuse the settings of a run at ``url``, in the file ``path``, if they choose a place that is not ``typed``."""
    saved, usual = read_record(path), flatten(Configuration())
    values = flatten(saved)
    own = {name: values[name] for name in _keys_with(Trait.OF_PROCESS) if values[name] != usual[name]}
    chosen = _chosen(saved) | own  # which no run writes
    if chosen.pop("checkpoint.mirror", url) != url:  # this is a copy, and the original may be in use
        chosen["checkpoint.mirror"] = url
    if missing := {name: value for name, value in chosen.items() if name not in typed}:
        options = command_text("train", flags=_flags(missing)).removeprefix("diloco train ")
        raise ConfigurationError(
            f"The settings at {url} need {options}, and a bucket can't choose that here. Nothing was fetched. Add "
            "what you want of it to the command."
        )


def _chosen(saved: Configuration) -> Values:
    """Return the places in the settings of a run that are outside its folder."""
    chosen = _places(saved)
    if saved.data.bpe_vocab_size is not None:
        chosen.pop("data.tokenizer")
    if not saved.data.names_file:
        chosen.pop("data.format", None)
    return chosen


def record_of(resume: Path, replica: int | None = None) -> tuple[Path, Path]:
    """Return the run folder that ``resume`` is, or that contains the checkpoint ``resume``, and its settings file.

    The settings of a ``replica`` are in its own folder, if it has one. On a machine with only some of a run's replicas,
    all settings are in such folders.
    """
    if (own := resume / f"replica-{replica}" / CONFIG_FILE).is_file():  # which may name its own data
        return resume, own
    for folder in (resume, *Path(os.path.abspath(resume)).parents[:2]):
        if (folder / CONFIG_FILE).is_file():
            return folder, folder / CONFIG_FILE
    for path in sorted(resume.glob(f"replica-*/{CONFIG_FILE}")):
        return resume, path
    wrong = f"there is no {CONFIG_FILE} in it" if resume.exists() else "it does not exist"
    raise ConfigurationError(
        f"--resume {resume} must be a run folder, such as runs/streaming-tiny, or a checkpoint in one, but {wrong}."
    )


def _record(configuration: Configuration) -> str:
    """Return the text of ``config.toml``, with which `diloco train config.toml` repeats the run."""
    names = _keys_with(Trait.OF_PROCESS, Trait.OF_CALL)
    left_out = {name: keys_of(Configuration)[name].default for name in names}
    values = flatten(configuration) | left_out
    text = to_toml(build(Configuration, values), beneath=preset_values(configuration.preset, values))
    return f"# Settings as resolved by diloco {__version__}; `diloco train config.toml` repeats this run.\n\n{text}"


def _with_absolute_paths(configuration: Configuration) -> Configuration:
    """Return the configuration with absolute input paths, so that the run can resume in another working directory."""
    values = flatten(dataclasses.replace(configuration, data=configuration.data.absolute()))
    values |= {key: absolute(values[key]) for key in _CODE_KEYS if values[key] is not None}
    if values["checkpoint.mirror"] is not None and "://" not in values["checkpoint.mirror"]:
        values["checkpoint.mirror"] = os.path.abspath(os.path.expanduser(values["checkpoint.mirror"]))
    for name, key in keys_of(Configuration).items():
        if key.kind is Path and Trait.OF_CALL not in key.traits and values[name] is not None:
            values[name] = Path(os.path.abspath(values[name].expanduser()))
    place = Path(configuration.model.place).expanduser()
    if configuration.model.kind == "module":
        values["model.source"] = absolute(values["model.source"])
    elif configuration.model.kind == "hf" and place.exists():  # else a name on the hub
        values["model.source"] = f"hf:{os.path.abspath(place)}"
    return build(Configuration, values)


_FIRST = (
    *("preset", "algorithm", "train.steps", "train.sequence_length", "optimizer.name", "model.source"),
    *("data.paths", "data.format", "network.transport", "network.run"),
)
"""Keys from which others follow, or without which a run is refused."""

_THEN = "train.data_parallel_steps", "sync.inner_steps", "sync.outer"
"""Keys from which others follow, and which follow from the first ones."""


def resume_command(configuration: Configuration, folder: Path, join: Sequence[str] = (), *, found: bool = False) -> str:
    """Return the command that resumes a stopped run, with the settings that the run's folder does not keep.

    Args:
        join: addresses of peers that still train. Those that this run was started with may have been reused since.
        found: whether this peer is to found the swarm again.
    """
    values, usual = flatten(configuration), flatten(Configuration())
    elastic = configuration.network.elastic
    own = [name for name in _keys_with(Trait.OF_PROCESS) if not (elastic and name == "network.join")]
    kept = own_code(values) | {name: values[name] for name in own if values[name] != usual[name]}
    kept |= {"network.join": tuple(join)} if join else {}
    found_flag = {"--found": True} if found else {}
    return command_text("train", flags={"--resume": folder} | _flags(kept) | found_flag)


def join_command(configuration: Configuration, folder: Path) -> str:
    """Return the command with which other peers join a swarm with these resolved settings, without --join ADDRESS.

    It sets the keys in which the run differs from what the other flags give, except those of one machine. Settings that
    no flags express are read from the record in ``folder``.
    """
    goal = flatten(configuration)
    private = {*filter(_is_private, goal)}
    usual = flatten(Configuration()) | preset_values(configuration.preset, {"model.source": configuration.model.source})
    own: Values = {}  # what each replica has of its own: resolved with it, but not printed
    if configuration.data.local:
        private.add("data.paths")
        own = {"data.paths": goal["data.paths"]}
    values: Values = {name: goal[name] for name in _FIRST if goal[name] != usual[name] and name not in private}
    if configuration.preset != Configuration.preset:
        values = {"preset": configuration.preset, **values}
    if configuration.preset == FINETUNE:  # its number of steps follows from data
        values["train.steps"] = goal["train.steps"]
    with contextlib.suppress(ConfigurationError):  # such as a list that is empty
        for _ in range(4):  # what was set may change what follows
            settings = flatten(_resolved(_with_absolute_paths(compose_for_model(CommandLine(values=values | own)))))
            other = {name: value for name, value in goal.items() if value != settings[name] and name not in private}
            if not other:
                text = command_text("train", flags=_flags(values))
                # paths below the working directory are relative, since other machines have them as well
                return re.sub(rf"(?<![\w./-]){re.escape(str(Path.cwd()))}/", "", text)
            values |= {name: other[name] for name in _THEN if name in other} or other
    return command_text("train", folder / CONFIG_FILE)


def _is_private(name: str) -> bool:
    return _has(name, Trait.OF_MACHINE, Trait.OF_PROCESS)


def _has(name: str, *traits: Trait) -> bool:
    """Return whether a setting has one of these traits."""
    return not keys_of(Configuration)[name].traits.isdisjoint(traits)


def _keys_with(*traits: Trait) -> list[str]:
    return [name for name in keys_of(Configuration) if _has(name, *traits)]


def told_settings(configuration: Configuration) -> dict[str, dict[str, Any]]:
    """Return the settings by section that a service elsewhere may get: no addresses, and nothing of one machine."""
    sections: dict[str, Any] = {}
    for name, value in flatten(configuration).items():
        if not _is_private(name):
            *section, key = name.split(".")
            at = sections
            for part in section:
                at = at.setdefault(part, {})
            at[key] = value
    return sections


def _flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by flag: the short one where there is one, except for switches, whose negation has none."""
    keys = {name: keys_of(Configuration)[name] for name in values}
    return {key.flag if key.is_switch else key.short or key.flag: values[name] for name, key in keys.items()}
