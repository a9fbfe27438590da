"""The tokenizer of a run whose replicas have data of their own, if it is a BPE: the founder trains it on its own text.

All members publish it beside the state of fragments, so that whoever joins takes it from them and needs nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from diloco.checkpoint import run_folder
from diloco.data import Corpus, Tokenizer, build_corpus, load_tokenizer
from diloco.errors import RendezvousError, TransportError
from diloco.train.fleet import Fleet
from diloco.train.joining import newest_checkpoints
from diloco.train.settings import RunSettings
from diloco.waiting import waiting_for

States = Mapping[int, Mapping[str, Tensor]]

TOKENIZER = 1 << 40
"""Its number among the states that are published; those of fragments are far less."""

_NAME = "tokenizer.json"
_MAX_BYTES = 64 << 20
_RETRY_S = 1.0


def is_of_founder(settings: RunSettings) -> bool:
    """Return whether the founder trains the tokenizer for all replicas."""
    return settings.data.local and settings.data.bpe_vocab_size is not None


def agree_on_tokenizer(settings: RunSettings, fleet: Fleet) -> tuple[Corpus, States]:
    """Return the corpus of this replica, tokenised as all are, and the states that it publishes with the tokenizer.

    The founder trains it, or goes on with that of its checkpoint; the others wait for it.
    """
    transport, tokenizer = fleet.transport, None
    if fleet.joining or transport.replica != transport.view.members[0]:
        tokenizer = _fetched(fleet)
    elif (resume := settings.checkpoint.resume) is not None:
        for checkpoint in newest_checkpoints(Path(resume), transport.replica):
            tokenizer = load_tokenizer(run_folder(checkpoint.path))
    corpus = build_corpus(settings.data, settings.train.sequence_length, tokenizer)
    content = torch.frombuffer(bytearray(corpus.tokenizer.to_json().encode()), dtype=torch.uint8)
    published = {TOKENIZER: {_NAME: content}}
    transport.publish(published.__getitem__, lambda number: 0)  # the fragments follow
    return corpus, published


def _fetched(fleet: Fleet) -> Tokenizer:
    transport, why = fleet.transport, ""
    with waiting_for(lambda: f"the tokenizer of the founder ({why or 'it is being sent'})", math.inf):
        while True:
            others = [member for member in transport.view.members if member != transport.replica]
            try:
                content = transport.fetch(TOKENIZER, others, _MAX_BYTES).result()[_NAME]
                return Tokenizer(bytes(content.tolist()).decode(), source="the tokenizer of the founder")
            except TransportError as error:
                if (failure := fleet.failure()) is not None:
                    raise failure from error
                why = str(error).partition(". ")[0]
            except (LookupError, AttributeError, ValueError) as error:
                raise RendezvousError(f"What the others published is no tokenizer: {error}.") from error
            time.sleep(_RETRY_S)
