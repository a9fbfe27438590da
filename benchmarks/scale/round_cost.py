"""What one round with means in float32 costs by the number of replicas; counted, not simulated."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.algorithm import Codec, plan_exchange
from diloco.transport import streams_to_each

__all__ = ["RoundCost"]


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """What one round of ``numel`` values costs M replicas; the bytes are those of the busiest replica.

    Attributes:
        pattern: all-gather or reduce-scatter.
        sent_bytes: the bytes of the replica that sends most.
        received_bytes: the bytes of the replica that receives most.
        bytes_per_value: the greater of the two over ``numel``.
        messages: the headers and votes of all replicas, ``2 M (M - 1)``.
        connections: the connections of a replica with one process: payload streams and control to each other replica.
        room_bytes: the buffers that a replica allocates when the round begins, for payloads and the float32 sum.
            Payloads are freed as they are summed, in replica order, so all buffers are full at once only if that of
            the first replica arrives last.
    """

    pattern: str
    sent_bytes: int
    received_bytes: int
    bytes_per_value: float
    messages: int
    connections: int
    room_bytes: int

    @classmethod
    def of(cls, codec: Codec, numel: int, num_replicas: int, *, streams: int | None = None) -> RoundCost:
        """Return the cost by the trainer's own plan; by default there are as many ``streams`` per replica as with BBR.

        >>> from diloco.algorithm import make_codec
        >>> cost = RoundCost.of(make_codec("fp4"), 1 << 20, 2)
        >>> cost.pattern, cost.sent_bytes, cost.connections
        ('all-gather', 528384, 5)
        """
        plan, others = plan_exchange(codec, numel, num_replicas), num_replicas - 1
        each = streams or streams_to_each(others, "bbr")
        start, stop = max(plan.shards, key=lambda shard: shard[1] - shard[0])
        incoming = codec.payload_bytes(numel if plan.pattern == "all-gather" else stop - start)
        return cls(
            pattern=plan.pattern,
            sent_bytes=max(plan.sent),
            received_bytes=max(plan.received),
            bytes_per_value=plan.busiest_bytes / numel,
            messages=2 * num_replicas * others,
            connections=others * (each + 1),
            room_bytes=others * incoming + 4 * numel,
        )
