"""A base model small enough for tests, a tokenizer with a chat template, and conversations."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.huggingface import config_of

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_base(
    place: Path,
    *,
    seed: int = 0,
    template: str | None = TEMPLATE,
    marked: bool = True,
    name: str = "Llama",
    **changes: Any,
) -> Path:
    """Create a transformers folder with weights and the tokenizer of `write_tokenizer`."""
    import torch
    from transformers import AutoModelForCausalLM

    write_tokenizer(place, template=template, marked=marked)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(
            config_of(name, **{"max_position_embeddings": 256, **changes})
        ).save_pretrained(place)
    return place


def write_tokenizer(
    place: Path, *, template: str | None = TEMPLATE, tokens: Sequence[str] = SPECIAL[1:], marked: bool = True
) -> Path:
    """Save a byte tokenizer with more ``tokens``, by default those of ChatML, which may be ``marked`` as special."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    from diloco.data import ByteTokenizer

    tokenizer = Tokenizer.from_str(ByteTokenizer().to_json())
    tokenizer.add_special_tokens([SPECIAL[0]])
    added = [AddedToken(token, special=marked, normalized=False) for token in tokens]
    (tokenizer.add_special_tokens if marked else tokenizer.add_tokens)(added)
    library = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0])
    library.chat_template = template
    library.save_pretrained(place)
    return place


def asked(question: str, answer: str) -> dict[str, Any]:
    """Return a record of one question and its answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_records(place: Path, records: list[dict[str, Any]]) -> Path:
    """Write conversations to a .jsonl file."""
    place.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return place


def write_sums(place: Path, *, number: int = 60, seed: int = 0) -> Path:
    """Write conversations that ask for sums."""
    rng = random.Random(seed)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(number)]
    return write_records(place, [asked(f"{one}+{other}?", str(one + other)) for one, other in pairs])
