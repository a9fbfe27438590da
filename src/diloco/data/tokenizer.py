"""Tokenizers of the ``tokenizers`` library, as documents need them.

A document begins and ends with the tokens that the tokenizer's own post-processor adds (``<s>``, ``[SEP]``), and with
an end-of-document token in any case. Normalisers may change a text and an unknown token may stand for a part of it, so
the bytes of a text are counted in the text itself, and divided among its tokens by the characters that they stand for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from diloco.data.settings import HUB_PREFIX, MAX_TOKENIZER_BYTES, TOKENIZER_NAME, DataSettings
from diloco.data.source import FROM_HUB, as_data_error
from diloco.errors import ConfigurationError, DataError, from_extra, nearest
from diloco.private_files import check_regular, read_regular
from diloco.waiting import fetching

if TYPE_CHECKING:
    import tokenizers

EOS = "<|endoftext|>"
"""The end-of-document token of the vocabularies made here. In a text, these characters are plain text."""

_VOCABULARIES = (
    *(TOKENIZER_NAME, "tokenizer_config.json", "vocab.json", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
"""The files of which a folder with a tokenizer has at least one."""

_BESIDE = (
    *("merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("generation_config.json", "config.json"),
)
"""The other files of a folder that say something about its tokenizer."""

_ENDS = (
    *(("tokenizer_config.json", "eos_token"), ("special_tokens_map.json", "eos_token")),
    *(("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id")),
)
"""Where a folder names its end-of-document token, the most specific first."""

_END_NAMES = ("endoftext", "endofdocument", "endofsentence", "eos", "eostoken", "/s", "eod", "eot", "sep")
"""What end-of-document tokens are called, without their case, brackets and separators, the likeliest first."""

_OTHER_KINDS = f"A vocabulary of another kind ({', '.join(_VOCABULARIES[2:])}) is given as the folder that holds it."

_BRACKETS = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""How control tokens look that are not marked as such."""

_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""The token of a byte, in vocabularies with byte fallback."""
_ADDED_BYTE = re.compile(rf'"content":\s*"{_BYTE.pattern}"')

_PROBE = "The quick  brown fox,\n\n\tit's 12,345 µm Grüße – 東京 🙂 ﬁ e\u0301 \u00a0x_\r\n"
"""A text with white space, several scripts and composed characters."""


class Tokenizer:
    """A tokenizer of a ``tokenizer.json``.

    Special tokens that are written out in a text are encoded as plain characters, so no document can end itself.

    Args:
        content: the text of the file.
        eos: the token that ends a document, or its id. None: the last one that the post-processor adds, or the one that
            is called like one.
        source: the name of the tokenizer in error messages.

    Raises:
        DataError: the file cannot be read, can't encode every text, or has no token that can end a document. The
            encoding methods raise it for a text that they can't encode.
    """

    def __init__(self, content: str, *, eos: str | int | None = None, source: str = "the tokenizer") -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(_with_plain_bytes(content))
        except Exception as error:  # the library raises nothing more specific
            raise DataError(f"{source} is not a valid {TOKENIZER_NAME}: {error}. {_OTHER_KINDS}") from error
        self._source = source
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None  # the same text has the same tokens
        self._check_encodes()
        self.begin_prompt, ends = self._added_around()  # the tokens that begin a text
        self._eos = _end_token(self._tokenizer, eos, ends, source)
        self._tokenizer.add_special_tokens([self._eos])  # some files list it without marking it as special
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values())  # number of ids
        self.dtype = smallest_dtype(self.vocab_size)
        self.eos_id = vocabulary[self._eos]  # the token that ends every document
        self.end_document = ends if ends[-1:] == [self.eos_id] else [*ends, self.eos_id]
        # where the token that ends a document also begins one, there is one of them between two documents
        self.begin_document = [] if self.begin_prompt[-1:] == [self.eos_id] else self.begin_prompt
        unknown = _unknown_token(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._control_ids = {index for index, token in added.items() if token.special and token.content != unknown}

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` alone, without those that begin and end a document."""
        return [index for ids, _ in self._encoded([text]) for index in ids]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a document that goes on after ``text``; at least one."""
        return [*self.begin_prompt, *self.encode(text)] or [self.eos_id]

    def encode_documents(self, documents: Sequence[str]) -> NDArray[Any]:
        """Return the ids of all documents, packed end to end: ``(n,)`` of type `dtype`."""
        pieces = [np.zeros(0, dtype=self.dtype)]
        for begin in range(0, len(documents), 1024):  # limits how many of the library's bulky results exist at once
            for ids, _ in self._encoded(documents[begin : begin + 1024]):
                pieces.append(np.array([*self.begin_document, *ids, *self.end_document], dtype=self.dtype))
        return np.concatenate(pieces)

    def encode_counted(self, documents: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.uint32]]:
        """Return what `encode_documents` does, and how many UTF-8 bytes of its document each token stands for.

        Together these are the bytes of the documents; tokens that begin or end one stand for none.
        """
        pieces, counts = [np.zeros(0, dtype=self.dtype)], [np.zeros(0, dtype=np.uint32)]
        for begin in range(0, len(documents), 1024):
            texts = documents[begin : begin + 1024]
            for text, (ids, spans) in zip(texts, self._encoded(texts, spans=True), strict=True):
                pieces.append(np.array([*self.begin_document, *ids, *self.end_document], dtype=self.dtype))
                counts.append(np.zeros(len(pieces[-1]), dtype=np.uint32))
                if ids:
                    counts[-1][len(self.begin_document) :][: len(ids)] = bytes_of_tokens(text, spans)
                else:  # a normaliser drops all of it
                    counts[-1][-1] = len(text.encode())
        return np.concatenate(pieces), np.concatenate(counts)

    def _encoded(self, texts: Sequence[str], *, spans: bool = False) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the ids of each text and, if asked for, the characters that each of them stands for."""
        result = []
        for text, encoding in zip(texts, self._batch(texts, spans=spans), strict=True):
            ids = encoding.ids
            if self._control_ids.isdisjoint(ids):
                result.append((ids, encoding.offsets if spans else []))
            else:  # a piece of a Unigram model, or a word of a table, may be called like a special token
                result.append(self._encoded_in_parts(text))
        return result

    def _encoded_in_parts(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text cut after the first character of every special token that it spells out."""
        (encoding,) = self._batch([text], spans=True)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        cuts = [0, *(begin + 1 for index, (begin, end) in found if index in self._control_ids and end > begin + 1)]
        cuts = [*sorted(set(cuts)), len(text)]
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for (begin, _), part in zip(
            pairwise(cuts), self._batch([text[i:j] for i, j in pairwise(cuts)], spans=True), strict=True
        ):
            ids += part.ids
            spans += [(begin + first, begin + last) for first, last in part.offsets]
        if control := self._control_ids.intersection(ids):
            raise DataError(
                f"{self._source} encodes part of a text as the special token {self._name_of(min(control))!r}. The text "
                f"begins with {text[:40]!r}. Remove these characters from it, or use another tokenizer."
            )
        return ids, spans

    def _batch(self, texts: Sequence[str], *, spans: bool) -> list[tokenizers.Encoding]:
        encode = self._tokenizer.encode_batch if spans else self._tokenizer.encode_batch_fast
        try:
            return encode(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing more specific
            raise DataError(
                f"{self._source} can't encode every text: {error}. Use a tokenizer with an unknown token, byte "
                "fallback or a byte-level vocabulary."
            ) from error

    def _check_encodes(self) -> None:
        """Raise `DataError` if there are texts that raise an error or lose characters without an unknown token."""
        if why := _what_is_lost(self._tokenizer):
            raise DataError(
                f"{self._source} has no unknown token and {why}, so it would drop characters of a text. Use a "
                "tokenizer with an unknown token, byte fallback or all 256 bytes."
            )
        (encoding,) = self._batch([_PROBE], spans=False)
        if not encoding.ids:
            raise DataError(f"{self._source} encodes {_PROBE!r} to nothing. Use another tokenizer.")

    def _added_around(self) -> tuple[list[int], list[int]]:
        """Return the ids that the post-processor puts before and after a text."""
        encoding = self._tokenizer.encode(_PROBE)
        ids, is_text = encoding.ids, [not special for special in encoding.special_tokens_mask]
        if not any(is_text):
            return [], []
        return ids[: is_text.index(True)], ids[len(ids) - is_text[::-1].index(True) :]

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of ``ids``, an array of any shape, as the library's decoder gives it.

        Special tokens are dropped, and so are ids outside the vocabulary (a model's vocabulary may be larger). Bytes
        that are not valid UTF-8 become U+FFFD.
        """
        known = [index for index in np.asarray(ids).ravel().tolist() if 0 <= index < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=True)

    def decode_settled(self, ids: Sequence[int]) -> str:
        """Return the beginning of `decode` that no further token can change."""
        text = self.decode(ids)
        invalid = self._tokenizer.token_to_id("<0xFF>")  # no character contains this byte
        if invalid is not None:  # one such byte after others makes the decoder replace all of them
            text = os.path.commonprefix([text, self.decode([*ids, invalid])])  # noqa: RUF071  # of characters
        return text.rstrip("\ufffd")  # bytes of a character that isn't complete

    @property
    def added_tokens(self) -> dict[int, str]:
        """The tokens that are not made of pieces of text, such as those that end documents or answers."""
        return {index: token.content for index, token in self._tokenizer.get_added_tokens_decoder().items()}

    @property
    def facts(self) -> dict[str, str]:
        """What two sides that use it must have in common, by name: digests that no version of the library changes."""
        tokens = json.dumps(sorted(self._tokenizer.get_vocab(with_added_tokens=True).items()))
        return {"tokenizer": f"{self.vocab_size} tokens, {xxhash.xxh3_64_hexdigest(f'{tokens} {self._eos}'.encode())}"}

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``; `load_tokenizer` reads them back."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.to_json() + "\n", "utf-8")
        config = {"eos_token": self._eos, "tokenizer_class": "PreTrainedTokenizerFast"}
        if self.begin_prompt:
            config["bos_token"] = self._name_of(self.begin_prompt[0])
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def _name_of(self, index: int) -> str:
        return str(self._tokenizer.id_to_token(index))

    def encodes_like(self, other: Tokenizer) -> bool:
        """Return whether both give the same tokens for every document."""
        around = [(tokenizer.begin_document, tokenizer.end_document) for tokenizer in (self, other)]
        return around[0] == around[1] and self.to_json() == other.to_json()

    def to_json(self) -> str:
        """Return the text of the ``tokenizer.json``."""
        return self._tokenizer.to_str(pretty=True)


def bytes_of_tokens(text: str, spans: ArrayLike) -> NDArray[np.int64]:
    """Return how many UTF-8 bytes of ``text`` each of its tokens stands for, ``(n,)``; together all of them.

    ``spans``, ``(n, 2)``, are the characters of each token. Characters between two tokens, which a normaliser dropped,
    count with the later one, those after the last with that. A character of several tokens counts with the first.

    >>> bytes_of_tokens("né 漢!", [(0, 1), (1, 2), (3, 4), (3, 4), (4, 5)]).tolist()
    [1, 2, 4, 0, 1]
    """
    ends = np.asarray(spans, dtype=np.int64).reshape(-1, 2)[:, 1].clip(0, len(text))
    ends = np.maximum.accumulate(ends)
    ends[-1:] = len(text)
    if not text.isascii():
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        widths = np.ones(len(text), dtype=np.uint8)
        for first in (0x80, 0x800, 0x10000):
            widths += points >= first
        ends = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])[ends]  # bytes before each character
    sizes: NDArray[np.int64] = np.diff(ends, prepend=0)
    return sizes


def _end_token(tokenizer: tokenizers.Tokenizer, named: str | int | None, ends: Sequence[int], source: str) -> str:
    """Return the token that ends a document: the one that is ``named``, or that the post-processor adds last."""
    if isinstance(named, str):
        if tokenizer.token_to_id(named) is None:
            raise DataError(
                f"{source} has no token {named!r} to end a document with. Name another as eos_token in a "
                "tokenizer_config.json next to it."
            )
        return named
    if ends:
        return str(tokenizer.id_to_token(ends[-1]))
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    others = [token for token in tokenizer.get_vocab(with_added_tokens=False) if _BRACKETS.fullmatch(token)]
    token_named = None
    if named is not None and named >= 0:
        token_named = tokenizer.id_to_token(named)
    # a configuration of a model may hold the id of another vocabulary, where this one has a piece of text
    if token_named is not None and token_named in (*added, *others):
        return str(token_named)
    names: dict[str, str] = {}
    for token in (*added, *sorted(others)):
        names.setdefault(re.sub("[^a-z/]", "", token.lower()), token)
    for name in _END_NAMES:
        if name in names:
            return names[name]
    raise DataError(
        f"{source} has no token that ends a document: nothing names one, and none is called like one (<|endoftext|>, "
        "</s>, <eos>, [SEP]). Name one as eos_token in a tokenizer_config.json next to it."
    )


def _with_plain_bytes(content: str) -> str:
    """Return a ``tokenizer.json`` in which the bytes that a model falls back to are pieces of text, never special.

    Trainers of the library put them into the vocabulary only as special tokens.
    """
    if not _ADDED_BYTE.search(content):  # reading a large file costs time
        return content
    described = json.loads(content)
    model = described["model"]
    if not model.get("byte_fallback"):
        return content
    vocabulary = model["vocab"]
    pieces = vocabulary if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}  # Unigram: with scores
    kept = []
    for token in described["added_tokens"]:
        name = token["content"]
        if not (_BYTE.fullmatch(name) and name in pieces):
            kept.append(token)
    return json.dumps({**described, "added_tokens": kept})


def _unknown_token(tokenizer: tokenizers.Tokenizer) -> str | None:
    """Return the token that stands for what a tokenizer has no token for; None if there is none."""
    model = tokenizer.model
    if hasattr(model, "unk_token"):
        unknown: str | None = model.unk_token
        return unknown
    described = json.loads(model.__getstate__())  # a Unigram model, which shows its unknown token only in its file
    index = described.get("unk_id")
    return None if index is None else str(described["vocab"][index][0])


def _what_is_lost(tokenizer: tokenizers.Tokenizer) -> str | None:
    """Return why a tokenizer drops what it has no token for; None if it doesn't.

    Only a BPE without an unknown token does. The library's other models raise an error.
    """
    from tokenizers import models

    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.unk_token is not None:
        return None
    steps = [step for step in (tokenizer.pre_tokenizer, tokenizer.normalizer) if step is not None]
    if any(b'"ByteLevel"' in step.__getstate__() for step in steps):
        needed = set(byte_letters())
    elif model.byte_fallback:
        needed = {f"<0x{byte:02X}>" for byte in range(256)}
    else:
        return "neither byte fallback nor a byte-level vocabulary"
    missing = len(needed - tokenizer.get_vocab(with_added_tokens=False).keys())
    return f"lacks {missing} of the 256 bytes" if missing else None


class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids are the 256 bytes of UTF-8, and 256 for the end of a document.

    Its ``tokenizer.json`` is a BPE without merges in which every byte is a token. Encoding copies bytes instead.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né"), tokenizer.vocab_size
    ([110, 195, 169], 257)
    >>> tokenizer.decode([110, 195, 169, 256])
    'né'
    >>> tokenizer.encode_documents(["a", "b"])
    array([ 97, 256,  98, 256], dtype=uint16)
    """

    def __init__(self) -> None:
        super().__init__(_byte_vocabulary(), eos=EOS)

    def encode_documents(self, documents: Sequence[str]) -> NDArray[Any]:
        encoded = [document.encode() for document in documents]
        ends = np.cumsum([len(document) + 1 for document in encoded], dtype=np.int64)
        tokens = np.full(ends[-1] if encoded else 0, self.eos_id, dtype=self.dtype)
        is_byte = np.ones(len(tokens), dtype=np.bool_)
        is_byte[ends - 1] = False
        tokens[is_byte] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        return tokens

    def encode_counted(self, documents: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.uint32]]:
        tokens = self.encode_documents(documents)
        return tokens, (tokens != self.eos_id).astype(np.uint32)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest type that holds every id: uint16 for up to 65536 ids, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


@cache
def _byte_vocabulary() -> str:
    from tokenizers import models

    vocabulary = {letter: number for number, letter in enumerate([*byte_letters(), EOS])}
    return str(_byte_level(models.BPE(vocab=vocabulary, merges=[]), words=False).to_str())


def _byte_level(model: Any, *, words: bool = True) -> tokenizers.Tokenizer:
    """Return a tokenizer in which each byte is a letter of `byte_letters`."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_letters() -> list[str]:
    """Return the printable letter that byte-level vocabularies use for each of the 256 bytes (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_tokenizer(settings: DataSettings, documents: Iterable[str] = ()) -> Tokenizer:
    """Return the tokenizer that ``settings.tokenizer`` names; train a BPE on ``documents``, the training documents.

    ``hf:NAME[@REVISION]`` is that of a model on the hub, or of a local folder with a model or a tokenizer. If there is
    no ``tokenizer.json``, transformers converts the tokenizer.
    """
    name = settings.tokenizer
    if settings.bpe_vocab_size is not None:
        return _train_bpe(documents, settings.bpe_vocab_size)
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if name.startswith(HUB_PREFIX):
        path = tokenizer_folder(name)
    elif not path.exists():
        raise ConfigurationError(
            f"data.tokenizer={name!r} is neither 'bytes' nor 'bpe' nor an existing path; "
            f"{nearest(name, ['bytes', 'bpe'])} Otherwise give the path of a tokenizer.json, or hf:NAME for a "
            "tokenizer of the Hugging Face hub."
        )
    if path.is_dir() and not (path / TOKENIZER_NAME).is_file() and has_tokenizer(path):
        library = library_tokenizer(
            str(path), "hf", f"data.tokenizer={name!r} has no {TOKENIZER_NAME} and needs transformers"
        )
        return Tokenizer(library.backend_tokenizer.to_str(), eos=library.eos_token or stored_end(path), source=name)
    return load_tokenizer(path)


def has_tokenizer(folder: Path) -> bool:
    """Return whether ``folder`` has the files of a tokenizer, perhaps in a form that transformers has to convert."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def tokenizer_folder(name: str) -> Path:
    """Return the local folder or file that ``hf:PATH`` names, or the local copy of what ``hf:NAME[@REVISION]`` does."""
    place = name.removeprefix(HUB_PREFIX)
    path = Path(place).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    repository, _, revision = place.partition("@")
    patterns = [*_VOCABULARIES, *_BESIDE]
    with as_data_error(f"The tokenizer of {name}", FROM_HUB), fetching(place):
        path = Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    if not has_tokenizer(path):
        raise DataError(f"{name} has no tokenizer. Name another (--tokenizer).")
    return path


def _train_bpe(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with ``vocab_size`` ids: the end-of-document token, 256 bytes, and merges.

    The same documents give the same tokenizer. Too few repeated pairs for that many merges raise `DataError`.
    """
    from tokenizers import models, trainers

    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS],
        initial_alphabet=byte_letters(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        raise DataError(
            f"The training documents are too few for a BPE with a vocabulary of {vocab_size}: they give {size} ids. "
            f"Use --tokenizer bpe:{size} or less, or give more text."
        )
    return Tokenizer(tokenizer.to_str(), eos=EOS)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer at ``path``: a ``tokenizer.json``, or a folder with one, as `Tokenizer.save` writes."""
    file = path / TOKENIZER_NAME if path.is_dir() else path
    try:
        content = read_regular(file, MAX_TOKENIZER_BYTES).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(
            f"{path} has no {TOKENIZER_NAME}, and no other vocabulary that transformers converts."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not a {TOKENIZER_NAME}: {error}. {_OTHER_KINDS}") from error
    except OSError as error:
        raise DataError(f"{file} can't be read: {error}.") from error
    tokenizer = Tokenizer(content, eos=stored_end(file.parent), source=str(file))
    plain = ByteTokenizer()
    is_plain = tokenizer.vocab_size == plain.vocab_size and tokenizer.to_json() == plain.to_json()
    return plain if is_plain else tokenizer


def stored_end(folder: Path) -> str | int | None:
    """Return the end-of-document token, or its id, that the files of a tokenizer or model in ``folder`` name."""
    for name, key in _ENDS:
        file = folder / name
        try:
            stored = json.loads(read_regular(file)) if file.exists() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{file} can't be read: {error}.") from error
        if not isinstance(stored, dict):
            raise DataError(f"{file} doesn't contain a JSON object.")
        value = stored.get(key)
        value = value.get("content") if isinstance(value, dict) else value  # a token is written in one of two forms
        value = value[0] if isinstance(value, list) and value else value  # a model may stop at several
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return value
    return None


def library_tokenizer(place: str, extra: str, needs: str) -> Any:
    """Load the tokenizer of ``hf:NAME`` or of a folder as an object of transformers, which ``extra`` installs."""
    with from_extra(extra, needs):
        from transformers import AutoTokenizer
    folder = tokenizer_folder(place)
    for path in (*(folder / name for name in (*_VOCABULARIES, *_BESIDE)), *folder.glob("*/*.jinja")):
        try:
            check_regular(path, MAX_TOKENIZER_BYTES)
        except (FileNotFoundError, NotADirectoryError):  # a folder has some of them, and a file alone none
            continue
        except OSError as error:
            raise DataError(f"{path} can't be read: {error}.") from error
    with as_data_error(f"The tokenizer of {place}", f"A folder with a {TOKENIZER_NAME} needs no conversion."):
        library: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        library.backend_tokenizer.to_str()
    return library
