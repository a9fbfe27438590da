"""The configuration of `diloco train`, composed from a preset, a TOML file and the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from diloco.config.flags import CommandLine, parse_flags
from diloco.config.keys import Values, build, flatten, merge, read_tables, read_toml, typed_values
from diloco.data import HUB_PREFIX, TOKENIZER_NAME
from diloco.errors import ConfigurationError
from diloco.model import ModelSettings, get_preset
from diloco.monitor import MonitorSettings
from diloco.plugins import confirm_file
from diloco.train import RunSettings
from diloco.traits import Trait
from diloco.transport import TRANSPORTS, NetworkSettings, TransportTraits

DEFAULT_PRESET = "tiny"
FINETUNE = "finetune"  # has no model of its own

_SHORT_RUN_ROUNDS = 50  # with fewer rounds the outer optimizer has no momentum
_LONGEST = 1024  # maximum sequence length of fine-tuning by default

DESCRIPTION = """Train a language model with DiLoCo or Streaming DiLoCo. Flags override a TOML
file, which overrides the preset. The defaults shown are those of the preset tiny.

Examples:
  diloco train                               the quick start, on bundled text
  diloco train run.toml --steps 2000         settings from a file and from flags
  diloco train --algorithm data-parallel     the baseline, all else the same
  diloco train --resume runs/streaming-tiny  resume a stopped run"""

_NAMED_BY = {
    ("optimizer.arguments", ""): "optimizer.name",
    ("model.arguments", ""): "model.source",
    **{("sync.arguments", role): f"sync.{role}" for role in ("codec", "outer", "merge", "average")},
}
"""Each table of arguments, or entry of one, and the key that names the object which takes them."""


@dataclass(frozen=True, kw_only=True)
class Configuration(RunSettings):
    """The settings of a run, its preset, and the settings of its monitoring."""

    preset: Annotated[str, Trait.NO_PLACE] = DEFAULT_PRESET
    """Preset of model and training; `diloco presets` lists all."""
    monitor: Annotated[MonitorSettings, Trait.OF_MACHINE, Trait.CHANGEABLE] = field(default_factory=MonitorSettings)

    @property
    def model_label(self) -> str:
        """The name of the model in the names of run folders."""
        return self.preset if self.model.source is None else self.model.label

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset != FINETUNE:
            get_preset(self.preset)  # which refuses an unknown one


def parse_arguments(arguments: Sequence[str]) -> CommandLine:
    """Parse the arguments of `diloco train`, an optional TOML file and flags in any order, without applying defaults.

    >>> compose(parse_arguments(["--replicas", "2", "--inner-steps", "25"])).sync.inner_steps
    25
    """
    shown = flatten(Configuration()) | preset_values(DEFAULT_PRESET)
    return parse_flags(Configuration, "train", DESCRIPTION, arguments, shown=shown)


def compose(line: CommandLine) -> Configuration:
    """Return the configuration composed of the layers preset, TOML file and flags.

    A model from a source replaces the model of the preset. If no tokenizer is given, it is the one of the weights that
    the run begins from.

    Raises:
        ConfigurationError: a value is not valid, or there are stored weights whose tokenizer isn't known.
    """
    in_file = values_in_file(line)
    asked = in_file | line.values
    preset = preset_values(asked.get("preset", DEFAULT_PRESET), asked)
    if _transport(asked).elastic:
        preset["network.replicas"] = 1  # a swarm begins with its first peer
    if (init_from := asked.get("train.init_from")) is not None and asked.get("model.source") is None:
        preset |= _model_of_folder(init_from.expanduser())
    settings = layered(flatten(Configuration()), preset, in_file, line.values)
    configuration = build(Configuration, settings)
    if "data.tokenizer" in asked:
        return configuration
    tokenizer = tokenizer_of_weights(configuration)
    if tokenizer is None:
        _refuse_unknown_tokenizer(configuration.model)
        return configuration
    return replace(configuration, data=replace(configuration.data, tokenizer=tokenizer))


def tokenizer_of_weights(configuration: Configuration) -> str | None:
    """Return the tokenizer of the weights that a new run begins from, as ``data.tokenizer``; None if there is none.

    It is that of ``train.init_from``, a run, a checkpoint or an export, else that of a model of transformers.
    """
    model, init_from = configuration.model, configuration.train.init_from
    if init_from is not None and (folder := _folder_of_weights(init_from.expanduser())) is not None:
        from diloco.data import ByteTokenizer, load_tokenizer

        return "bytes" if isinstance(load_tokenizer(folder), ByteTokenizer) else str(folder)
    if model.kind != "hf":
        return None
    from diloco.data import has_tokenizer

    local = Path(model.place).expanduser()
    if not local.is_dir():
        return f"{HUB_PREFIX}{model.place}"
    if (local / TOKENIZER_NAME).is_file():
        return str(local)
    return f"{HUB_PREFIX}{local}" if has_tokenizer(local) else None


def _folder_of_weights(place: Path) -> Path | None:
    """Return the folder with the tokenizer of the run, checkpoint, export or file of weights at ``place``, if any."""
    is_file_of_export = place.is_file() and (place.parent / "config.json").is_file()
    folder = place.parent if is_file_of_export else place
    for each in (folder, folder.parent.parent if folder.parent.name == "checkpoints" else folder):
        if (each / TOKENIZER_NAME).is_file():
            return each
    return None


def _refuse_unknown_tokenizer(model: ModelSettings) -> None:
    """Raise `ConfigurationError` if a model without a tokenizer has weights, which learned the ids of one."""
    if model.kind != "hf" or model.huggingface.weights == "fresh":
        return
    folder = Path(model.place).expanduser()
    if [*folder.glob("*.safetensors*"), *folder.glob("pytorch_*.bin")]:
        raise ConfigurationError(
            f"{model.place} has weights but no tokenizer. Name the one with which they were trained: --tokenizer PATH "
            "or hf:NAME. To train new weights, use --model.arguments.weights fresh."
        )


def values_in_file(line: CommandLine) -> Values:
    """Return the values of the TOML file of a command line, on top of the line's own defaults.

    Raises:
        ConfigurationError: the file has an unknown key or an invalid value, or names code that lies elsewhere.
    """
    if line.file is None:
        return line.defaults
    try:
        values = read_toml(line.file, Configuration)
    except ConfigurationError as error:
        if line.file.suffix == ".toml":
            raise
        raise ConfigurationError(f"{error} To train on it, use --data {line.file}.") from error
    confirm_file(line.file, values, line.values)
    return line.defaults | values


def asked_values(line: CommandLine) -> Values:
    """Return the values that a command line asks for, by flags or in its file."""
    return values_in_file(line) | line.values


def layered(values: Values, *layers: Mapping[str, Any]) -> Values:
    """Return ``values`` with the layers on top of it, each above the one before.

    Of a table, a layer changes only the entries that it names. If it selects another optimizer, codec or the like, the
    arguments of the one below are dropped.
    """
    for layer in layers:
        values = dict(values)
        for (table, entry), name in _NAMED_BY.items():
            if layer.get(name, values[name]) != values[name]:
                values[table] = {key: argument for key, argument in values[table].items() if entry and key != entry}
        for name, value in layer.items():
            values[name] = merge(values.get(name), value)
    return values


def preset_values(name: str, above: Mapping[str, Any] = {}) -> Values:
    """Return every key that preset ``name`` sets.

    Args:
        above: the values in the layers above, such as the number of steps.

    >>> preset_values("tiny")["train.data_parallel_steps"]
    200
    >>> preset_values("tiny", {"train.steps": 30})["optimizer.warmup_steps"]
    7
    >>> preset_values("tiny", {"network.transport": "swarm"})["train.data_parallel_steps"]
    0
    """
    preset = None if name == FINETUNE else get_preset(name)
    tables = read_tables(Path(__file__).with_name("presets.toml"))
    values: Values = {"preset": name} | typed_values(tables[name], RunSettings, name)
    if preset is None:
        return values | _finetune_values(above)
    own = values["train.steps"]
    steps = above.get("train.steps", own)
    values |= {
        "train.steps": steps,
        "train.sequence_length": preset.sequence_length,
        "train.data_parallel_steps": steps * values.get("train.data_parallel_steps", 0) // own,
        "optimizer.warmup_steps": min(values["optimizer.warmup_steps"], steps // 4),
        "model.arguments": preset.model.arguments(),
    }
    without_start, over_links = tables.get(f"{name}-without-start"), _transport(above).meets
    average = above.get("sync.arguments", {}).get("average")
    at_home = average.get("at_home") if isinstance(average, Mapping) else None  # what is no table is refused later
    if without_start is not None and (over_links or at_home) and "train.data_parallel_steps" not in above:
        values |= typed_values(without_start, RunSettings, name)
        rounds = steps // max(1, above.get("sync.inner_steps", values["sync.inner_steps"]))
        rising = {"outer": {"momentum_warmup": rounds * 2 // 3}}
        values |= {"train.data_parallel_steps": 0, "sync.arguments": rising}
    return values if preset.model.vocab_size is None else values | {"data.tokenizer": f"bpe:{preset.model.vocab_size}"}


def _transport(values: Mapping[str, Any]) -> TransportTraits:
    return TRANSPORTS[values.get("network.transport", NetworkSettings.transport)]


def _finetune_values(above: Mapping[str, Any]) -> Values:
    """Return what follows from the number of steps, the model and its adapters.

    Nesterov momentum mu makes the outer step `1 / (1 - mu)` times as long. It takes about that many rounds to build up
    and as many to decay, so a short run overshoots. Without momentum and with a learning rate of 1, the global
    parameters become the mean of the local ones.
    """
    steps = above.get("train.steps", 10)
    inner_steps = above.get("sync.inner_steps", min(20, max(1, steps // 10)))
    values: Values = {
        "train.steps": steps,
        "train.sequence_length": _LONGEST,
        "sync.inner_steps": inner_steps,
        "optimizer.warmup_steps": min(100, steps // 20),
    }
    if not any(key.startswith("sync.outer") for key in above) and "outer" not in above.get("sync.arguments", {}):
        short = {"sync.outer": "sgd", "sync.outer_learning_rate": 1.0}
        long = {"sync.outer": "nesterov", "sync.outer_learning_rate": 0.7, "sync.outer_momentum": 0.6}
        values |= short if steps < _SHORT_RUN_ROUNDS * inner_steps else long
    if above.get("model.lora_rank") == 0:  # all weights are trained
        values["optimizer.learning_rate"] = 2e-5
    if above.get("model.source") is not None and _transport(above).elastic:
        values["network.run"] = f"finetune-{ModelSettings(source=above['model.source']).label}"
    return values


def _model_of_folder(folder: Path) -> Values:
    """Return the sizes for a native decoder that starts from its export, or none."""
    if not (folder / "config.json").is_file():
        return {}
    from diloco.trained import exported_model

    model = exported_model(folder)
    return {} if model is None else {"model.arguments": model.decoder.arguments()}
