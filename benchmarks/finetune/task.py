"""A task with countable success: a chat asks for codes that a base model has learned from sentences.

The test questions are not among the training questions. To answer them, a model must keep the codes that it knows and
learn the form of the question and of the answer.
"""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnopqrst"
END = "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %} {{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %} assistant:{% endif %}"
)
# A name, other words, and the code of the name. The shorter the distance, the sooner the code is learned.
PATTERNS = (
    "pair {name} {code}",
    "pair {name} {code}",
    "code {name} = {code}",
    "that {name} is {code}",
    "the code of {name}{more} is {code}",
    "look for {name}{more} and find {code}",
    "who asks for {name}{more} gets {code}",
    "user: tell me {name}?{more} assistant: {code}",
    "{other} or {name}{more} , the second is {code}",
)
WORDS = ("today", "surely", "here", "again", "What", "It")
KNOWN = ("tell me {name}?", "{code}")
"""A question and an answer in the form that the base model has seen."""
WANTED = ("What is {name}?", "It is {code}")
"""A question and an answer in the form that fine-tuning teaches."""

Codes = Sequence[tuple[str, str]]


def known_codes() -> Codes:
    """Return the same 400 names of two letters on every call, each with a code of two letters."""
    rng = random.Random(0)
    names = [one + other for one in LETTERS for other in LETTERS]
    rng.shuffle(names)
    return [(name, rng.choice(LETTERS) + rng.choice(LETTERS)) for name in names]


def texts(number: int) -> list[str]:
    """Return training texts of the base model: one to eight sentences each, every one with a name and its code."""
    rng, codes = random.Random(1), known_codes()
    return ["\n".join(_sentence(rng, codes) for _ in range(rng.randint(1, 8))) for _ in range(number)]


def _sentence(rng: random.Random, codes: Codes) -> str:
    (name, code), (other, _) = rng.sample(codes, 2)
    more = "".join(f" {word}" for word in rng.choices(WORDS, k=rng.choice((0, 0, 0, 1, 2, 4, 6))))
    return " " + rng.choice(PATTERNS).format(name=name, code=code, other=other, more=more)


def write_conversations(path: Path, codes: Codes, form: tuple[str, str]) -> None:
    """Write one conversation per line, a question and its answer in the given form."""
    with path.open("w", encoding="utf-8") as file:
        for name, code in codes:
            asked, answer = (each.format(name=name, code=code) for each in form)
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_tokenizer(folder: Path, learned_from: Iterable[str]) -> int:
    """Write a byte-level BPE with a chat template, most of whose tokens are whole words, and return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(learned_from, trainer)
    fast: Any = PreTrainedTokenizerFast
    library = fast(tokenizer_object=tokenizer, eos_token=END)
    library.chat_template = TEMPLATE
    library.save_pretrained(folder)
    return tokenizer.get_vocab_size()
