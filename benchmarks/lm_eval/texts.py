"""The input of both evaluations: documents that the run held out, and multiple-choice questions about lines."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from diloco.data import DataSettings, read_documents, split_documents

__all__ = ["write_texts"]

CONTEXT_LINES = 6
CHOICES = 4


def write_texts(folder: Path, data: DataSettings, *, characters: int = 4000, lines_each: int = 10) -> None:
    """Write ``documents.jsonl`` and ``lines.jsonl``. The same text gives the same files.

    Args:
        folder: the folder to write to.
        data: the data settings of the run, whose held-out documents are used.
        characters: the number of characters kept of each document.
        lines_each: the number of questions per document.
    """
    texts = read_documents(data.paths, text_field=data.text_field, document_separator=data.document_separator)
    heldout = split_documents(texts, data.heldout_fraction, data.max_documents)[1]
    documents = [text[:characters] for text in heldout]
    _write(folder / "documents.jsonl", [{"text": text} for text in documents])
    _write(folder / "lines.jsonl", _questions(documents, lines_each))


def _questions(documents: list[str], lines_each: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    by_document = [text.splitlines() for text in documents]
    candidates = [[line for line in lines if len(line.strip()) > 15] for lines in by_document]
    questions = []
    for number, lines in enumerate(by_document):
        places = [n for n in range(CONTEXT_LINES, len(lines)) if len(lines[n].strip()) > 15]
        for place in rng.sample(places, min(lines_each, len(places))):
            others = rng.sample([n for n in range(len(documents)) if n != number and candidates[n]], CHOICES - 1)
            choices = [lines[place], *(rng.choice(candidates[other]) for other in others)]
            rng.shuffle(choices)
            context = "\n".join(lines[place - CONTEXT_LINES : place]) + "\n"
            # The harness moves white space at the end of the context to the continuation.
            questions.append({"context": context, "choices": choices, "answer": choices.index(lines[place])})
    return questions


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
