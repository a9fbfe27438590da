"""Events as a short run emits them. A test gives the fields that it checks; the others have arbitrary values."""

from typing import Any

from diloco import events


def started(step: int = 0, **given: Any) -> events.RunStarted:
    fields = {"total_steps": 9, "algorithm": "diloco", "num_replicas": 2, "parameters": 7, "tokens_per_step": 8}
    return events.RunStarted(step=step, **{**fields, "facts": {"a": "b"}, **given})


def step(number: int, loss: float = 1.0, **given: Any) -> events.StepFinished:
    fields = {
        "learning_rate": 0.25,
        "gradient_norm": 2.0,
        "tokens": number,
        "step_s": 0.5,
        "tokens_per_s": 16.0,
        "sent_bytes": 1000 * number,
        "received_bytes": 0,
        "compute_utilization": 0.75,
    }
    return events.StepFinished(step=number, loss=loss, **{**fields, **given})


def sent(replica: int, fragment: int, outer_step: int, **given: Any) -> events.RoundSent:
    fields = {"step": 1, "payload_bytes": 1}
    return events.RoundSent(replica=replica, fragment=fragment, outer_step=outer_step, **{**fields, **given})


def committed(replica: int, fragment: int, outer_step: int, **given: Any) -> events.RoundCommitted:
    fields = {"step": 2, "contributors": (0, 1), "sent_bytes": 5, "received_bytes": 6, "wait_s": 0.0}
    return events.RoundCommitted(replica=replica, fragment=fragment, outer_step=outer_step, **{**fields, **given})


def void(replica: int, fragment: int, outer_step: int, reason: str = "late", **given: Any) -> events.RoundVoid:
    fields = {"step": 2, "reason": reason}
    return events.RoundVoid(replica=replica, fragment=fragment, outer_step=outer_step, **{**fields, **given})


def view(number: int, members: tuple[int, ...], *, step: int = 1, **given: Any) -> events.ViewChanged:
    fields = {"replica": 0, "joined": (), "left": (), "reason": "nothing came for 8 s"}
    return events.ViewChanged(step=step, view=number, members=members, **{**fields, **given})


def fetched(fragment: int, came: int, of_all: int, *, here: bool = False, step: int = 0) -> events.StateFetched:
    """Return a ``StateFetched`` for two fragments of 100 bytes each."""
    return events.StateFetched(
        step=step,
        fragment=fragment,
        fragment_received_bytes=came,
        fragment_expected_bytes=100,
        received_bytes=of_all,
        expected_bytes=200,
        here=here,
    )


def evaluated(step: int, loss: float, **given: Any) -> events.Evaluated:
    fields = {"perplexity": 12.18, "bits_per_byte": 3.6067, "heldout_tokens": 4096}
    return events.Evaluated(step=step, heldout_loss=loss, **{**fields, **given})
