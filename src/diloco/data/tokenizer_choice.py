"""Make the tokenizer of a run: bytes, a BPE trained on the text, or one loaded from a file or the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from diloco.data.settings import HUB_PREFIX, DataSettings
from diloco.data.tokenizer import EOS, ByteTokenizer, Tokenizer, byte_letters, checked_utf8
from diloco.errors import ConfigurationError, DataError, from_extra, nearest
from diloco.waiting import fetching

__all__ = [
    "given_tokenizer",
    "library_tokenizer",
    "load_hub_tokenizer",
    "load_tokenizer",
    "make_tokenizer",
    "train_bpe",
]

_KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<EOS>", "[EOS]", "<｜end▁of▁sentence｜>")


def make_tokenizer(settings: DataSettings, documents: Iterable[str]) -> Tokenizer:
    """Return the tokenizer that ``settings.tokenizer`` names; train a BPE on ``documents``, the training documents.

    Raises:
        ConfigurationError: it is not ``"bytes"``, ``"bpe"``, an existing path or an ``hf:`` name.
        DataError: as `train_bpe`, `load_tokenizer` and `load_hub_tokenizer`.
    """
    if settings.bpe_vocab_size is not None:
        return train_bpe(islice(documents, settings.bpe_documents), settings.bpe_vocab_size)
    return given_tokenizer(settings)


def given_tokenizer(settings: DataSettings) -> Tokenizer:
    """Return the tokenizer as `make_tokenizer` does, if it needs no training."""
    if settings.tokenizer == "bytes":
        return ByteTokenizer()
    if settings.tokenizer.startswith(HUB_PREFIX):
        return load_hub_tokenizer(settings.tokenizer)
    path = Path(settings.tokenizer).expanduser()
    if not path.exists():
        raise ConfigurationError(
            f"data.tokenizer={settings.tokenizer!r} is neither 'bytes' nor 'bpe' nor an existing path; "
            f"{nearest(settings.tokenizer, ['bytes', 'bpe'])} Otherwise give the path of a tokenizer.json, or hf:NAME "
            "for a tokenizer of the Hugging Face hub."
        )
    return load_tokenizer(path)


def train_bpe(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with ``vocab_size`` ids: the end-of-document token, 256 bytes, and merges.

    The same documents give the same tokenizer.

    Raises:
        DataError: the documents have too few repeated pairs for that many merges.
    """
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS],
        initial_alphabet=byte_letters(),
        show_progress=False,
    )
    count = 0

    def checked() -> Iterator[str]:
        nonlocal count
        for document in documents:
            checked_utf8(document)
            count += 1
            yield document

    tokenizer.train_from_iterator(checked(), trainer)
    made = tokenizer.get_vocab_size()
    if made < vocab_size:
        raise DataError(
            f"{count} training documents are too few for a BPE with a vocabulary of {vocab_size}: they give {made} "
            f"ids. Use --tokenizer bpe:{made} or less, or give more text."
        )
    return Tokenizer(tokenizer.to_str(), eos=EOS)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer at ``path``: a ``tokenizer.json``, or a folder with one, as `Tokenizer.save` writes.

    The end-of-document token is the ``eos_token`` of the ``tokenizer_config.json`` next to it. Without that entry, the
    vocabulary must contain exactly one of the usual names (``<|endoftext|>``, ``</s>``, ``<|end_of_text|>`` and a few
    others).

    Raises:
        DataError: the file is missing, cannot be read, does not spell texts exactly, or does not say which token ends a
            document.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    content = _read(file)
    if content is None:
        raise DataError(f"{file} does not exist.")
    config_file = file.with_name("tokenizer_config.json")
    config = _read(config_file)
    eos = None if config is None else _json_object(config, config_file).get("eos_token")
    if isinstance(eos, dict):  # the longer of the two forms in which a token is written there
        eos = eos.get("content")
    description = _json_object(content, file)
    if not isinstance(eos, str):
        added = description.get("added_tokens")
        names = [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
        candidates = [name for name in _KNOWN_EOS if name in names]
        if len(candidates) != 1:
            raise DataError(
                f"{file} does not say which token ends a document: "
                + (
                    f"each of {', '.join(candidates)} could be it. "
                    if candidates
                    else "none of its tokens has a usual name for it. "
                )
                + f'Put {{"eos_token": "..."}} into a {config_file.name} next to it.'
            )
        eos = candidates[0]
    tokenizer = Tokenizer(content, eos=eos, source=str(file))
    plain = ByteTokenizer()
    return plain if tokenizer.to_json() == plain.to_json() else tokenizer


def load_hub_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of ``hf:NAME``: of a model on the hub, or of a local folder with a model or a tokenizer.

    If there is no ``tokenizer.json``, transformers converts the tokenizer.

    Raises:
        DataError: there is no such tokenizer, the hub can't be reached, or as `load_tokenizer`.
        ConfigurationError: transformers is needed but not installed.
    """
    place = name.removeprefix(HUB_PREFIX)
    local = Path(place).expanduser()
    if local.exists():
        if local.is_file() or (local / "tokenizer.json").is_file():
            return load_tokenizer(local)
        return _converted(name)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        with fetching(place, "models"):
            file = Path(hf_hub_download(place, "tokenizer.json"))
            # `load_tokenizer` reads the end-of-document token from this file
            with suppress(EntryNotFoundError):
                hf_hub_download(place, "tokenizer_config.json")
    except LocalEntryNotFoundError as error:
        raise _unreadable(name, error) from error
    except EntryNotFoundError:
        return _converted(name)
    except Exception as error:  # the types vary: no such repository, no access, no connection, an invalid name
        raise _unreadable(name, error) from error
    return load_tokenizer(file)


def library_tokenizer(name: str, extra: str, needs: str) -> Any:
    """Load the tokenizer of ``hf:NAME`` or of a folder as an object of transformers.

    Args:
        extra, needs: as for `from_extra`.

    Raises:
        DataError: there is no such tokenizer, the hub can't be reached, or the tokenizer has no end-of-document token.
        ConfigurationError: transformers is not installed.
    """
    with from_extra(extra, needs):
        from transformers import AutoTokenizer
    place = name.removeprefix(HUB_PREFIX)
    local = Path(place).expanduser()
    try:
        with fetching(place, "models"):
            library: Any = AutoTokenizer.from_pretrained(
                str(local) if local.exists() else place, trust_remote_code=False
            )
        library.backend_tokenizer.to_str()
    except Exception as error:  # the library raises many types
        if "trust_remote_code" in str(error):
            raise DataError(
                f"The tokenizer of {name} is code that comes with it, which is not run. Use another."
            ) from error
        raise _unreadable(name, error) from error
    if library.eos_token is None:
        raise DataError(f"{name} has no token to end a document with.")
    return library


def _converted(name: str) -> Tokenizer:
    library = library_tokenizer(name, "hf", f"data.tokenizer={name!r} has no tokenizer.json and needs transformers")
    return Tokenizer(library.backend_tokenizer.to_str(), eos=str(library.eos_token), source=name)


def _unreadable(name: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())
    return DataError(
        f"The tokenizer of {name} cannot be read: {reason} Check the connection to the hub (HF_HUB_OFFLINE=1 disables "
        "it), or give a local model folder or tokenizer.json."
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _json_object(content: str, path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise DataError(f"{path} does not contain a JSON object.")
    return parsed
