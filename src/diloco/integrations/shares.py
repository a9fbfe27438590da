"""Other data for each replica."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Subset

from diloco.errors import ConfigurationError

__all__ = ["replica_share"]


def replica_share(dataset: Any, *, replica: int, num_replicas: int, seed: int | None = 0) -> Any:
    """What of a map-style data set one replica trains on: as many samples for each replica, and no sample for two.

    Equal shares make epochs of equally many steps, which replicas need: one that ended an epoch early would be waited
    for. Samples that can't be shared out equally, fewer than M, are left out.

    Args:
        dataset: with ``__len__`` and ``__getitem__``. Of a `datasets.Dataset` the share is one, too.
        replica: m.
        num_replicas: M.
        seed: of the order in which samples are dealt, the same on all replicas; None: the order that they have, every
            M-th sample to the same replica.

    Raises:
        ConfigurationError: if there is no such replica, less than one sample for each, or no length.

    >>> [list(replica_share(range(7), replica=m, num_replicas=3, seed=None)) for m in range(3)]
    [[0, 3], [1, 4], [2, 5]]
    """
    if not 0 <= replica < num_replicas:
        raise ConfigurationError(
            f"replica={replica} of {num_replicas} was given; 0 to {num_replicas - 1} would work. Nothing was done."
        )
    if not hasattr(dataset, "__len__"):
        raise ConfigurationError(
            f"a {type(dataset).__name__} has no length; datasets.distributed.split_dataset_by_node(dataset, "
            f"rank={replica}, world_size={num_replicas}) would work for a stream of Hugging Face's. "
            "Nothing was shared out."
        )
    each = len(dataset) // num_replicas
    if each == 0:
        raise ConfigurationError(
            f"{len(dataset)} samples were given to {num_replicas} replicas; one for each at least would work. "
            "Nothing was shared out."
        )
    order = torch.arange(len(dataset))
    if seed is not None:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    indices = order[replica : each * num_replicas : num_replicas].tolist()
    return dataset.select(indices) if hasattr(dataset, "select") else Subset(dataset, indices)
