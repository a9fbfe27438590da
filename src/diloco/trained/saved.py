"""Load what a run saved: its weights, or a model ready to use; and export that for ``transformers`` and ``peft``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from diloco.algorithm import (
    all_parameters,
    check_whole,
    local_shard,
    model_state,
    named_parameters,
    set_whole_,
    trainable_parameters,
)
from diloco.checkpoint import Checkpoint, Lazy, list_checkpoints, new_folder, open_checkpoint, run_folder
from diloco.data import (
    HUB_PREFIX,
    ChatTokenizer,
    DataSettings,
    Tokenizer,
    has_tokenizer,
    load_tokenizer,
    make_tokenizer,
)
from diloco.devices import Precision, choose_device
from diloco.errors import CheckpointError, ConfigurationError
from diloco.model import (
    CARD_NAME,
    GENERATION_NAME,
    LanguageModel,
    ModelSettings,
    Transformer,
    build_language_model,
    check_vocabulary,
    is_huggingface_folder,
    native_weights,
    read_json,
    stored_tensors,
    tensors_in,
)
from diloco.plugins import confirm, same_code
from diloco.private_files import read_regular
from diloco.units import diff, visible
from diloco.waiting import described

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REST = "rest"  # the part of a checkpoint with the result of `rest_of_state`, if that is not empty
ORIGIN_FILE = "diloco.json"  # only in exported folders: describes the weights


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model, ready to use."""

    model: LanguageModel  # in evaluation mode
    tokenizer: Tokenizer  # the tokenizer of the run
    step: int | None  # inner steps of the checkpoint; None for a folder of ``transformers``
    sequence_length: int  # tokens per sequence in training; at most 2048 if that is unknown
    path: Path  # the checkpoint or folder
    weights: str = "global parameters"  # describes them

    @property
    def run(self) -> Path:
        """The run folder of a checkpoint."""
        return run_folder(self.path)

    @property
    def has_template(self) -> bool:
        """Whether its tokenizer has a chat template."""
        folder, name = self._tokenizer_folder, "tokenizer_config.json"
        stored = read_json(folder / name) if (folder / name).is_file() else {}
        return (folder / "chat_template.jinja").is_file() or "chat_template" in stored

    def chat_tokenizer(self, format: str = "chat") -> ChatTokenizer:
        """Return its tokenizer with the chat template, or another one, as `DataSettings.format` names it."""
        return ChatTokenizer(str(self._tokenizer_folder), format)

    @property
    def generation(self) -> dict[str, Any]:
        """The ``generation_config.json`` of the model from which the run began, or of the folder; empty without one."""
        file = self._tokenizer_folder / GENERATION_NAME
        return read_json(file) if file.is_file() else {}

    def stop_tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens that end an answer, or a document: what was learned as its end, and those of the base."""
        stored = self.generation.get("eos_token_id")
        stops = {token for token in (stored if isinstance(stored, list) else [stored]) if isinstance(token, int)}
        if self.generation.get("_from_model_config"):  # transformers wrote it, perhaps from values that nobody chose
            stops &= tokenizer.added_tokens.keys()
        learned = tokenizer.answer_ends if isinstance(tokenizer, ChatTokenizer) else frozenset[int]()
        return sorted({token for token in stops if 0 <= token < self.model.vocab_size} | learned | {tokenizer.eos_id})

    @property
    def _tokenizer_folder(self) -> Path:
        return self.path if self.step is None else self.run

    def length(self, asked: int | None, name: str) -> int:
        """Return the context length in tokens: ``asked`` by the setting ``name``, or the training length if None."""
        longest = self.model.max_sequence_length
        if asked is None:
            return min(self.sequence_length, longest)
        return check_whole(f"{name} with this model", asked, 1, longest)


def load_trained(
    path: Path,
    device: str = "cpu",
    *,
    step: int | None = None,
    source: str | None = None,
    dequantize: bool = False,
    average_last: int = 1,
) -> Trained:
    """Load the model of a run, a checkpoint, or a folder of ``transformers``, such as an exported one.

    Args:
        device: where to load it, as for `diloco.devices.choose_device`.
        step: inner steps of the checkpoint of a run; None: the latest.
        source: the function that builds the model, as `ModelSettings.source`, if it is code of the user's own. The name
            in the checkpoint is only compared with it. Or where the base of adapters lies now, as ``hf:FOLDER``.
        dequantize: whether to load the base model of adapters without the quantisation of the run.
        average_last: the number of checkpoints, the one of ``step`` and those before it, whose global parameters are
            averaged.
    """
    target = choose_device(device)
    if step is None and is_huggingface_folder(path):
        if source is not None:
            raise _no_own_code(path, source)
        if average_last > 1:
            raise ConfigurationError(f"{path} is not a run, so it has no {average_last} checkpoints to average.")
        return _load_huggingface(path, target)
    checkpoint = open_checkpoint(path) if step is None else _checkpoint_of_step(path, step)
    settings = model_settings(checkpoint, source)
    bare = dequantize and settings.quantization is not None
    model = build_language_model(
        replace(settings, quantization=None) if bare else settings,
        seed=checkpoint.fact("seed", int, 0),
        device=target,
        definition=checkpoint.fact("definition", dict, {}),
    )
    values, weights = read_weights(checkpoint.path), "global parameters"
    if average_last > 1:
        averaged = _last_checkpoints(checkpoint, average_last)
        values = _mean_weights(values, [checkpoint.values("global") for checkpoint in averaged])
        weights = f"mean of the global parameters of {average_last} checkpoints, from step {averaged[0].step}"
    if own := checkpoint.fact("at_home", str, ""):
        weights += f", with {visible(own, 400)}"
    load_parameters(model, values)
    if bare:
        weights += f", trained beside {settings.quantization} weights and merged into the original ones"
    tokenizer = load_tokenizer(run_folder(checkpoint.path))
    length = checkpoint.fact("sequence_length", int, least=1)
    return Trained(model.eval(), tokenizer, checkpoint.step, length, checkpoint.path, weights)


def model_settings(checkpoint: Checkpoint, source: str | None) -> ModelSettings:
    """Return the settings of the model in a checkpoint, with the ``source`` that the user named, if any."""
    described = checkpoint.fact("model", dict)
    stored = described.get("source")
    confirm(checkpoint.path, {"model.source": stored}, {} if source is None else {"model.source": source})
    moved = described.get("lora_rank") and str(source).startswith("hf:") and str(stored).startswith("hf:")
    if source is not None and not same_code(stored, source) and not moved:
        raise _no_own_code(checkpoint.path, source)
    try:
        return ModelSettings.of(described | {"source": source or stored})
    except ConfigurationError as error:
        raise CheckpointError(f"{checkpoint.path} describes its model in a way that is not valid: {error}") from error


def _no_own_code(path: Path, source: str) -> ConfigurationError:
    return ConfigurationError(
        f"The model in {path} was not built by code of your own, so --model {source} has no effect. Leave it out."
    )


def _checkpoint_of_step(run: Path, step: int) -> Checkpoint:
    checkpoints = {checkpoint.step: checkpoint for checkpoint in list_checkpoints(run / "checkpoints")}
    if step not in checkpoints:
        there = ", ".join(map(str, checkpoints)) or "none"
        raise CheckpointError(f"{run} has no checkpoint of step {step}. Its steps are: {there}.")
    return checkpoints[step]


def _last_checkpoints(newest: Checkpoint, number: int) -> list[Checkpoint]:
    """Return ``newest`` and the checkpoints of its run before it, ``number`` in all, the oldest first."""
    saved = []
    for checkpoint in list_checkpoints(newest.path.parent):
        if checkpoint.serial <= newest.serial and checkpoint.step <= newest.step:  # a run may have gone back
            saved.append(checkpoint)
    if len(saved) < number:
        there = ", ".join(str(checkpoint.step) for checkpoint in saved)
        raise CheckpointError(
            f"{run_folder(newest.path)} has no {number} checkpoints up to step {newest.step} to average, only those "
            f"of the steps {there}. checkpoint.keep says how many a run keeps."
        )
    return saved[-number:]


def _mean_weights(values: Mapping[str, Tensor], averaged: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Return ``values`` with the means over checkpoints in place of the global parameters. Equal ones stay equal."""

    def mean(name: str) -> Tensor:
        if name not in averaged[0]:
            return values[name]
        return torch.stack([values[name].double() for values in averaged]).mean(0).to(averaged[0][name].dtype)

    return Lazy({name: name for name in values}, mean)


def exported_model(folder: Path) -> ModelSettings | None:
    """Return the settings of the native decoder that was exported to a folder; None: it is of another model."""
    model = _origin(folder).model
    return None if model is None else ModelSettings.of({"arguments": model})


class _Origin(msgspec.Struct):
    """What an exported folder says about itself; these defaults are for a folder from elsewhere."""

    # many models declare longer sequences than memory holds
    sequence_length: Annotated[int, msgspec.Meta(ge=1)] = 2048
    weights: str = "as stored"
    model: dict[str, Any] | None = None  # `DecoderSettings`, if it is the native decoder


def _origin(folder: Path) -> _Origin:
    try:
        return msgspec.json.decode(read_regular(folder / ORIGIN_FILE), type=described(_Origin))
    except FileNotFoundError:
        return _Origin()
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{folder / ORIGIN_FILE} can't be read: {error}.") from error


def _load_huggingface(folder: Path, device: torch.device) -> Trained:
    native, origin = exported_model(folder), _origin(folder)
    settings = native or ModelSettings(source=f"hf:{folder}", arguments={"weights": "stored"})
    model = build_language_model(settings, seed=0, device=device)
    if native:
        load_parameters(model, native_weights(folder))
    length = min(origin.sequence_length, model.max_sequence_length)
    tokenizer = _tokenizer_of(folder)
    check_vocabulary(model, tokenizer.vocab_size)
    return Trained(model.eval(), tokenizer, None, length, folder, origin.weights)


def _tokenizer_of(folder: Path) -> Tokenizer:
    if not has_tokenizer(folder):
        raise ConfigurationError(f"{folder} has no tokenizer. Copy that of the model there (tokenizer.json).")
    return make_tokenizer(DataSettings(tokenizer=f"{HUB_PREFIX}{folder}"))


def read_weights(path: Path, model: ModelSettings | None = None) -> Mapping[str, Tensor]:
    """Return parameter name -> value, from a ``.safetensors`` file, a checkpoint, or a run or ``transformers`` folder.

    Each value is read when it is asked for, so a rank that keeps a shard never holds all of them.

    Args:
        model: the model for which they are meant; None: any.

    Raises:
        CheckpointError: ``path`` contains no weights, or they are damaged.
        ConfigurationError: ``path`` says that they belong to another model.
    """
    if is_huggingface_folder(path):
        if model is not None and model.source is not None:
            return stored_tensors(path)
        if exported_model(path) is None:
            raise ConfigurationError(
                f"{path} holds no exported native decoder. For its own model, use --model hf:{path} instead of "
                "train.init_from."
            )
        return native_weights(path)
    if path.suffix != ".safetensors":
        checkpoint = open_checkpoint(path)
        parts = [checkpoint.values(part) for part in ("global", REST) if part in checkpoint.parts]
        return Lazy({name: (part, name) for part in parts for name in part}, lambda place: place[0][place[1]])
    return tensors_in([path])


def check_origin(path: Path, mine: Mapping[str, str]) -> None:
    """Refuse to begin from the run or checkpoint at ``path`` if its facts are not those of this run.

    Args:
        mine: facts by name, of what `diloco.train.identity` returns. Other folders and files say nothing about them.
    """
    if is_huggingface_folder(path) or path.suffix == ".safetensors":
        return
    saved = open_checkpoint(path).fact("identity", dict, {})
    if difference := diff(saved, mine, str(path), "this run", [name for name in mine if name in saved]):
        raise ConfigurationError(
            f"{difference}, so its weights would mean something else here. Begin with the model and the tokenizer of "
            f"that run (--data.tokenizer {run_folder(path)})."
        )


def load_parameters(model: LanguageModel, values: Mapping[str, Tensor]) -> None:
    """Set all trainable parameters of ``model``, and whatever other state ``values`` contain.

    If ``model`` wraps another, the names may be those of the wrapped one, as in files written by ``transformers``.

    Raises:
        CheckpointError: names or shapes differ, or a parameter is not finite; the message names them.
    """
    parameters, state = trainable_parameters(model), model_state(model)
    inside = hasattr(model, "wrapped") and not any(name.startswith("wrapped.") for name in values)
    stored = {f"wrapped.{name}" if inside else name: name for name in values}  # name here -> name there
    if odd := sorted((parameters.keys() - stored.keys()) | (stored.keys() - state.keys())):
        raise CheckpointError(f"The initial weights and the model have different parameters: {', '.join(odd[:5])}.")
    for name in stored:
        value = values[stored[name]]  # one at a time is read
        here, there = tuple(state[name].shape), tuple(value.shape)
        if here != there:
            raise CheckpointError(f"{name} has the shape {here} in the model, but {there} in the initial weights.")
        if name in parameters and not bool(value.float().isfinite().all()):  # not all types have it
            raise CheckpointError(
                f"{name} holds values that are not finite in the initial weights, so they are damaged. Use another "
                "copy, or an earlier checkpoint."
            )
        set_whole_(state[name], value)
        del value  # before the next one is read


def rest_of_state(model: LanguageModel, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return name -> tensor of the model's state without the trained ``parameters``: frozen parameters and buffers.

    The tensors are DTensors if the model is sharded. They are not copied.
    """
    ids = {id(parameter) for parameter in parameters.values()}
    trained = {name for name, parameter in all_parameters(model) if id(parameter) in ids}
    return {name: tensor for name, tensor in model.saved_state().items() if name not in trained}


def saved_once(model: LanguageModel) -> dict[str, Tensor]:
    """Return the state that ``model`` saves, tied tensors under their first name only."""
    first: dict[tuple[int, torch.Size], str] = {}
    state = {name: tensor.detach() for name, tensor in model.saved_state().items()}
    for name, tensor in state.items():
        first.setdefault((local_shard(tensor).data_ptr() or id(tensor), tensor.shape), name)
    return {name: state[name] for name in first.values()}


def export_huggingface(
    trained: Trained,
    folder: Path,
    *,
    dtype: Precision = "float32",
    overwrite: bool = False,
    card: str = "",
) -> PreTrainedModel:
    """Write ``folder``: weights, ``config.json``, ``generation_config.json``, tokeniser, ``diloco.json``, and a
    ``card`` as README.md.

    The folder declares the sequence length of the training, beyond which a model performs poorly. It is written next to
    its final path and renamed, so it exists completely or not at all. ``overwrite`` replaces an exported model. The
    model is converted in place, and returned as it was written.

    Raises:
        ConfigurationError: the model has no counterpart in ``transformers``, or ``folder`` is not empty.
        CheckpointError: the folder can't be written, or the weights don't fit ``dtype``. No partial export remains.
    """
    native = trained.model.settings if isinstance(trained.model, Transformer) else None
    longest = trained.length(None, "") if native else trained.model.max_sequence_length
    _check_place(folder, overwrite)
    made = trained.model.to_huggingface()
    made.to(getattr(torch, dtype))
    for name, parameter in named_parameters(made).items():
        if not bool(parameter.isfinite().all()):
            raise CheckpointError(
                f"{name} holds values that are not finite as {dtype}. Use another --dtype, such as bfloat16, or, if "
                "the checkpoint is damaged, another checkpoint. Nothing was exported."
            )
    tokenizer = trained.chat_tokenizer() if trained.has_template else trained.tokenizer
    config = made.config
    if native:
        config.max_position_embeddings = longest
    # Unless the tokenizer adds another, the token that ends a document also begins the first one. The model's
    # configuration has no padding token, because the embedding of that token would get no gradient.
    config.eos_token_id = tokenizer.eos_id
    if tokenizer.begin_prompt:
        config.bos_token_id = tokenizer.begin_prompt[0]
    elif config.bos_token_id is None or config.bos_token_id >= tokenizer.vocab_size:
        config.bos_token_id = tokenizer.eos_id
    generation = trained.generation or (made.generation_config.to_diff_dict() if made.generation_config else {})
    made.generation_config = type(made.generation_config)()  # the library refuses to write some that others wrote
    origin = {"model": asdict(replace(native, max_sequence_length=longest))} if native else {}
    with _writing(folder, overwrite, trained, dtype, origin, card) as partial:
        made.save_pretrained(partial)
        _save_tokenizer(partial, trained, tokenizer, generation | {"bos_token_id": config.bos_token_id}, longest)
    return made


def export_adapter(trained: Trained, folder: Path, *, overwrite: bool = False, card: str = "") -> None:
    """Write a folder that ``peft`` loads, with the tokeniser of the run, as `export_huggingface` writes one."""
    from diloco.model import save_adapter

    _check_place(folder, overwrite)
    model: Any = trained.model
    tokenizer = trained.chat_tokenizer() if trained.has_template else trained.tokenizer
    with _writing(folder, overwrite, trained, "float32", {}, card) as partial:
        save_adapter(partial, model, trainable_parameters(model))
        _save_tokenizer(partial, trained, tokenizer, trained.generation, trained.model.max_sequence_length)


def _save_tokenizer(
    folder: Path, trained: Trained, tokenizer: Tokenizer, generation: Mapping[str, Any], longest: int
) -> None:
    """Write a tokenizer with a padding token, and ``generation_config.json`` with all tokens that end an answer."""
    tokenizer.save(folder)
    file, stops, added = folder / "tokenizer_config.json", trained.stop_tokens(tokenizer), tokenizer.added_tokens
    stored = json.loads(file.read_text("utf-8"))
    pad = generation.get("pad_token_id")
    if not isinstance(pad, int) or pad not in added:
        pad = next((index for index, token in added.items() if token == stored.get("pad_token")), tokenizer.eos_id)
    ours = {"bos_token": stored["eos_token"], "pad_token": added[pad], "model_max_length": longest}
    ours |= {"clean_up_tokenization_spaces": False} | stored
    file.write_text(json.dumps(ours, indent=2) + "\n", "utf-8")
    kept = {name: value for name, value in generation.items() if name != "_from_model_config"}
    kept |= {"eos_token_id": stops if len(stops) > 1 else stops[0], "pad_token_id": pad}
    (folder / GENERATION_NAME).write_text(json.dumps(kept, indent=2) + "\n", "utf-8")


@contextmanager
def _writing(
    folder: Path, overwrite: bool, trained: Trained, dtype: Precision, more: Mapping[str, Any], card: str
) -> Iterator[Path]:
    """Yield a folder to fill, to which `ORIGIN_FILE` and the card are added and which then becomes ``folder``."""
    origin = {
        "diloco": metadata.version("diloco"),
        "run": trained.run.name,
        "checkpoint": trained.path.name,
        "step": trained.step,
        "weights": trained.weights,
        "dtype": dtype,
        "sequence_length": trained.sequence_length,
    }
    folder = Path(os.path.realpath(folder))  # keeps a link
    try:
        with new_folder(folder, replaces=overwrite) as partial:
            yield partial
            if card:
                (partial / CARD_NAME).write_text(card, "utf-8")
            (partial / ORIGIN_FILE).write_text(json.dumps({**origin, **more}, indent=2) + "\n", "utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} can't be written: {error}. What was there before is unchanged.") from error


def _check_place(folder: Path, overwrite: bool) -> None:
    """Raise `ConfigurationError` unless the path is free, or is an earlier export that may be overwritten."""
    is_export = (folder / ORIGIN_FILE).is_file()
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty and not is_export:
        raise ConfigurationError(f"{folder} exists and is not an exported model. Use another path.")
    if is_export and not overwrite:
        raise ConfigurationError(f"{folder} already exists. Use --overwrite, or another path.")
