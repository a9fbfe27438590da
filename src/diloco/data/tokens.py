"""Which tokenizer a run uses: made as the settings say, or read back from where one was saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco.data.bpe import BPETokenizer, train_bpe
from diloco.data.settings import DataSettings
from diloco.data.tokenizer import EOS, ByteTokenizer, Tokenizer
from diloco.errors import ConfigurationError, DataError, nearest

__all__ = ["BPETokenizer", "ByteTokenizer", "Tokenizer", "load_tokenizer", "make_tokenizer"]

_KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<EOS>", "[EOS]", "<｜end▁of▁sentence｜>")


def make_tokenizer(settings: DataSettings, documents: Sequence[str]) -> Tokenizer:
    """The tokenizer that ``settings.tokenizer`` names; a BPE is trained on ``documents``, the training documents.

    Raises:
        ConfigurationError: neither ``"bytes"`` nor ``"bpe"`` nor a path that exists.
        DataError: as `train_bpe` and `load_tokenizer`.
    """
    if settings.tokenizer == "bytes":
        return ByteTokenizer()
    if settings.tokenizer == "bpe":
        return train_bpe(documents, settings.bpe_vocab_size)
    path = Path(settings.tokenizer).expanduser()
    if not path.exists():
        raise ConfigurationError(
            f"data.tokenizer={settings.tokenizer!r} is neither a kind of tokenizer nor a path that exists; "
            f"{nearest(settings.tokenizer, ['bytes', 'bpe'])} The path of a tokenizer.json would also work. "
            "No tokenizer was made."
        )
    return load_tokenizer(path)


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
