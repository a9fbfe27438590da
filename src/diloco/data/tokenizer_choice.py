"""Which tokenizer a run uses: made as the settings say, or read back from where one was saved."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from diloco.data.settings import HUB_PREFIX, DataSettings
from diloco.data.tokenizer import EOS, BPETokenizer, ByteTokenizer, Tokenizer, train_bpe
from diloco.errors import ConfigurationError, DataError, nearest

__all__ = ["given_tokenizer", "load_hub_tokenizer", "load_tokenizer", "make_tokenizer", "vocabulary_size"]

_KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<EOS>", "[EOS]", "<｜end▁of▁sentence｜>")


def make_tokenizer(settings: DataSettings, documents: Iterable[str]) -> Tokenizer:
    """The tokenizer that ``settings.tokenizer`` names; a BPE is trained on ``documents``, the training documents.

    Raises:
        ConfigurationError: neither ``"bytes"`` nor ``"bpe"`` nor a path that exists nor an ``hf:`` name.
        DataError: as `train_bpe`, `load_tokenizer` and `load_hub_tokenizer`.
    """
    if settings.tokenizer == "bpe":
        return train_bpe(islice(documents, settings.bpe_documents), settings.bpe_vocab_size)
    return given_tokenizer(settings)


def given_tokenizer(settings: DataSettings) -> Tokenizer:
    """As `make_tokenizer`, for one that needs no training."""
    if settings.tokenizer == "bytes":
        return ByteTokenizer()
    if settings.tokenizer.startswith(HUB_PREFIX):
        return load_hub_tokenizer(settings.tokenizer)
    path = Path(settings.tokenizer).expanduser()
    if not path.exists():
        raise ConfigurationError(
            f"data.tokenizer={settings.tokenizer!r} is neither a kind of tokenizer nor a path that exists; "
            f"{nearest(settings.tokenizer, ['bytes', 'bpe'])} The path of a tokenizer.json would also work, or "
            "hf:NAME for one of the Hugging Face hub. No tokenizer was made."
        )
    return load_tokenizer(path)


def load_hub_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of ``hf:NAME``: of a model on the hub, or of a local folder with a model or a tokenizer.

    One without a ``tokenizer.json`` is converted by transformers.

    Raises:
        DataError: there is none, the hub cannot be reached, or as `load_tokenizer`.
        ConfigurationError: transformers is needed and not installed.
    """
    place = name.removeprefix(HUB_PREFIX)
    local = Path(place).expanduser()
    if local.exists():
        if local.is_file() or (local / "tokenizer.json").is_file():
            return load_tokenizer(local)
        return _converted(str(local), name)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        file = Path(hf_hub_download(place, "tokenizer.json"))
        # beside it, where `load_tokenizer` looks for the token that ends a document
        with contextlib.suppress(EntryNotFoundError):
            hf_hub_download(place, "tokenizer_config.json")
    except LocalEntryNotFoundError as error:
        raise _unreachable(name, error) from error
    except EntryNotFoundError:
        return _converted(place, name)
    except Exception as error:  # of several kinds: no such repository, no access, no connection, no proper name
        raise _unreachable(name, error) from error
    return load_tokenizer(file)


def _converted(place: str, name: str) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigurationError(
            f"data.tokenizer={name!r} has no tokenizer.json and needs transformers, which is not installed: "
            "pip install 'diloco[hf]'. No tokenizer was made."
        ) from error
    try:
        loaded: Any = AutoTokenizer.from_pretrained(place)
        content, eos = loaded.backend_tokenizer.to_str(), loaded.eos_token
    except Exception as error:  # of many kinds
        raise _unreachable(name, error) from error
    if eos is None:
        raise DataError(f"{name} has no token to end a document with. No tokenizer was made.")
    return BPETokenizer(content, eos=str(eos), source=name)


def _unreachable(name: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())
    return DataError(
        f"data.tokenizer={name!r} cannot be read: {reason} The folder of a model or a tokenizer.json on this machine "
        "would work (HF_HUB_OFFLINE=1 forbids the way to the hub). No tokenizer was made."
    )


def vocabulary_size(settings: DataSettings) -> int:
    """Ids of the tokenizer that ``settings`` name, before any text is read.

    Raises:
        ConfigurationError, DataError: as `make_tokenizer`.
    """
    if settings.tokenizer == "bpe":
        return settings.bpe_vocab_size
    return given_tokenizer(settings).vocab_size


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in ``path``: a ``tokenizer.json``, or a folder with one, such as `Tokenizer.save` leaves.

    Which token ends a document is read from ``eos_token`` in the ``tokenizer_config.json`` beside it; without that, it
    must have exactly one of the usual names (``<|endoftext|>``, ``</s>``, ``<|end_of_text|>`` and a few others).

    Raises:
        DataError: there is none, it cannot be read, is not byte-level, or does not say which token ends a document.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    content = _read(file)
    if content is None:
        raise DataError(f"{file} does not exist; a tokenizer.json would work. No tokenizer was made.")
    config_file = file.with_name("tokenizer_config.json")
    config_content = _read(config_file)
    eos = None if config_content is None else _json_object(config_content, config_file).get("eos_token")
    if isinstance(eos, dict):  # the longer of the two ways to write a token there
        eos = eos.get("content")
    description = _json_object(content, file)
    if not isinstance(eos, str):
        added = description.get("added_tokens")
        names = [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
        candidates = [name for name in _KNOWN_EOS if name in names]
        if len(candidates) != 1:
            raise DataError(
                f"{file} does not say which token ends a document: "
                + (f"{', '.join(candidates)} all could. " if candidates else "none of its tokens has a usual name. ")
                + f'{config_file.name} beside it with {{"eos_token": "..."}} would. No tokenizer was made.'
            )
        eos = candidates[0]
    tokenizer = BPETokenizer(content, eos=eos, source=str(file))
    plain = ByteTokenizer()
    return plain if tokenizer.to_json() == plain.to_json() else tokenizer


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}. No tokenizer was made.") from error


def _json_object(content: str, path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}. No tokenizer was made.") from error
    if not isinstance(parsed, dict):
        raise DataError(f"{path} holds no JSON object. No tokenizer was made.")
    return parsed
