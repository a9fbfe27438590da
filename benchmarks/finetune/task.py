"""A task whose success can be counted: facts that a base model knows as a table, asked for in words.

What is asked in the end is not among the questions that are trained on: to answer, a model must have kept what it knew
and learned how it is asked.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

__all__ = ["write_conversations", "write_table", "write_tokenizer"]

LETTERS = "abcdefghijklmnopqrst"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def facts() -> list[tuple[str, str]]:
    """400 names of two letters, each with a value of two: always the same ones."""
    rng = random.Random(0)
    names = [one + other for one in LETTERS for other in LETTERS]
    rng.shuffle(names)
    return [(name, rng.choice(LETTERS) + rng.choice(LETTERS)) for name in names]


def write_table(path: Path, *, documents: int, seed: int = 0) -> None:
    """Documents of twelve lines such as ``ba=fk``, which the base model is trained on."""
    rng, known = random.Random(seed), facts()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(documents):
            text = "\n".join(f"{name}={value}" for name, value in rng.choices(known, k=12))
            file.write(json.dumps({"text": text}) + "\n")


def write_conversations(train: Path, test: Path, *, questions: int) -> None:
    """Questions such as ``What is ba?`` with the answer ``fk``; no fact is in both files."""
    known = facts()
    for path, part in ((train, known[questions:]), (test, known[:questions])):
        with path.open("w", encoding="utf-8") as file:
            for name, value in part:
                said = [{"role": "user", "content": f"What is {name}?"}, {"role": "assistant", "content": value}]
                file.write(json.dumps({"messages": said}) + "\n")


def write_tokenizer(folder: Path) -> None:
    """Bytes, and the special tokens of the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from diloco.data.tokenizer import byte_letters

    vocabulary = {letter: number for number, letter in enumerate([*byte_letters(), *SPECIAL])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast: Any = PreTrainedTokenizerFast
    library = fast(tokenizer_object=tokenizer, eos_token=SPECIAL[0])
    library.chat_template = TEMPLATE
    library.save_pretrained(folder)
