"""How a replica gets its transport: the one place that knows how it is made."""

from __future__ import annotations

from contextlib import AbstractContextManager

from benchmarks.wan.counters import DEVICE
from benchmarks.wan.plan import Job
from diloco import Link as SenderLink
from diloco import connect_replica
from diloco.transport.base import Transport

__all__ = ["make_transport"]

PORT = 29400


def make_transport(job: Job, replica: int) -> AbstractContextManager[Transport]:
    """Replica ``replica``'s way to the others, with the package's defaults but for what ``job`` says.

    The method's option ``streams``: payload connections to each peer; absent or 0: the transport's own choice.
    ``pace``: hold sending back to this share of the link's rate, as who knows the link would.
    """
    pace = job.method.options.get("pace")
    return connect_replica(
        replica=replica,
        num_replicas=job.num_replicas,
        rendezvous=f"{job.addresses[0]}:{PORT}",
        interface=DEVICE,
        streams=job.method.options.get("streams", 0),
        round_timeout_s=job.timeout_s,
        link=SenderLink(pace * job.rate_bits_per_s) if pace else None,
    )
