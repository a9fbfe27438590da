"""Small tokenizers of every kind that people bring: normalisers, models and post-processors of well-known families."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
UNSPELL = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def library(model: Any, *added: AddedToken, **parts: Any) -> Tokenizer:
    """Return a tokenizer such as a user may provide."""
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_tokens(list(added))
    return tokenizer


def special(*names: str) -> list[AddedToken]:
    """Return special tokens."""
    return [AddedToken(name, special=True, normalized=False) for name in names]


def around(tokenizer: Tokenizer, single: str) -> Tokenizer:
    """Give a tokenizer a post-processor that adds the tokens in ``single``, such as ``<s> $A``."""
    names = [word for word in single.split() if word != "$A"]
    tokens = [(name, tokenizer.token_to_id(name)) for name in dict.fromkeys(names)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=tokens)
    return tokenizer


def byte_level(*added: AddedToken, letters: int = 256, unknown: str | None = None, **parts: Any) -> Tokenizer:
    """Return a byte-level BPE without merges."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:letters])}
    vocabulary |= {} if unknown is None else {unknown: letters}
    model = models.BPE(vocab=vocabulary, merges=[], unk_token=unknown)
    usual = {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)}
    return library(model, *added, **{**usual, "decoder": decoders.Sequence([decoders.ByteLevel()]), **parts})


def llama(*, prepend: bool, single: str = "$A", names: tuple[str, ...] = ("<unk>", "<s>", "</s>")) -> Tokenizer:
    """Return a tokenizer like that of Llama 2 or Gemma: converted from SentencePiece, with byte fallback."""
    words = [*names, *FALLBACK, "▁", *LETTERS, "▁t", "he", "▁the", "ü"]
    model = models.BPE(
        vocab={word: n for n, word in enumerate(words)},
        merges=[("▁", "t"), ("h", "e"), ("▁t", "he")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    steps = [normalizers.Prepend("▁")] if prepend else []
    strip = [decoders.Strip(" ", 1, 0)] if prepend else []
    parts = {"normalizer": normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])}
    parts["decoder"] = decoders.Sequence([*UNSPELL, *strip])
    return around(library(model, *special(*names), **parts), single)


def unigram(single: str = "$A </s>") -> Tokenizer:
    """Return a Unigram model like that of T5 or XLM-R, whose control tokens are pieces and which merges spaces."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("ing", -4.0)]
    pieces += [(letter, -5.0) for letter in f"{LETTERS}<>/ü"]
    space = pre_tokenizers.Metaspace(prepend_scheme="always")
    cleaned = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    parts = {"normalizer": cleaned, "pre_tokenizer": space, "decoder": decoders.Metaspace(prepend_scheme="always")}
    model = models.Unigram(pieces, unk_id=2)
    return around(library(model, *special("<pad>", "</s>", "<unk>"), **parts), single)


def wordpiece(*, unknown: str = "[UNK]") -> Tokenizer:
    """Return a tokenizer like BERT's: lower case, without accents and control characters, in pieces of words."""
    control = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [*control, *["the", "of", "and", "quick"], *LETTERS, *(f"##{letter}" for letter in LETTERS), *".,'-</>[]"]
    model = models.WordPiece({word: n for n, word in enumerate(words)}, unk_token=unknown)
    parts: dict[str, Any] = {"normalizer": normalizers.BertNormalizer(), "decoder": decoders.WordPiece()}
    parts["pre_tokenizer"] = pre_tokenizers.BertPreTokenizer()
    return around(library(model, *special(*control), **parts), "[CLS] $A [SEP]")


def words(unknown: str | None = "[UNK]") -> Tokenizer:
    """Return a table of whole words, one of which is called like a control token."""
    table = {word: n for n, word in enumerate(["[UNK]", "</s>", "the", "quick", "brown"])}
    model = models.WordLevel(table, unk_token=unknown or "[none]")
    return library(model, *special("[UNK]", "</s>"), pre_tokenizer=pre_tokenizers.WhitespaceSplit())


END = special("<|endoftext|>")
NFKC = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
SUFFIX = models.BPE(
    vocab={word: n for n, word in enumerate(["<unk>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)])},
    merges=[],
    unk_token="<unk>",
    end_of_word_suffix="</w>",
)

FAMILIES = {
    "Qwen, with NFC": lambda: byte_level(*END, normalizer=normalizers.NFC()),
    "byte-level, lower case": lambda: byte_level(*END, normalizer=NFKC),
    "Llama 3": lambda: around(byte_level(*special("<|begin|>", "<|end_of_text|>")), "<|begin|> $A"),
    "Llama 2": lambda: llama(prepend=True, single="<s> $A"),
    "Llama, no space": lambda: llama(prepend=False),
    "Gemma": lambda: llama(prepend=False, single="<bos> $A", names=("<unk>", "<bos>", "<eos>")),
    "OPT, one token for both ends": lambda: around(byte_level(*special("</s>")), "</s> $A"),
    "T5": unigram,
    "XLM-R": lambda: unigram("</s> $A </s>"),
    "BERT": wordpiece,
    "table of words": words,
    "suffixes of words": lambda: library(
        SUFFIX,
        *special("<unk>", "<eos>"),
        pre_tokenizer=pre_tokenizers.Whitespace(),
        normalizer=normalizers.Lowercase(),
        decoder=decoders.BPEDecoder(suffix="</w>"),
    ),
}
"""Makers of a tokenizer of each family."""

ODD = "  the e\u0301 thé,\r\n\tTHE\u0000 ﬁ Ｑ 东京 สวัสดี 👩‍👩‍👧 🙂 </s> [SEP] <|endoftext|> <eos> x  "
"""A text with all that tokenizers are known to change."""
