"""What one round costs by the number of replicas, with means in float32; counted and not simulated."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.algorithm.codec import Codec
from diloco.algorithm.exchange import plan_exchange
from diloco.transport.tcp import streams_to_each

__all__ = ["RoundCost"]


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """What one round of ``numel`` values costs M replicas, by count; bytes are those of the busiest replica.

    Attributes:
        pattern: all-gather or reduce-scatter.
        sent_bytes: by the replica that sends most.
        received_bytes: by the one that receives most.
        bytes_per_value: the greater of the two over ``numel``.
        messages: headers and votes on the whole network, ``2 M (M - 1)``.
        connections: of one replica of one process: payload streams and control, to each other replica.
        room_bytes: what a replica makes room for as the round begins: payloads to come, and the float32 sum. Pieces are
            freed as they are summed, in the order of replicas; it is all full at once only when the first of them is
            last to come.
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
        """By the trainer's own plan; ``streams`` to each other replica are by default what they are with BBR.

        >>> from diloco.algorithm.codec import make_codec
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
