"""The compared runs: their names and command lines."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ABLATIONS", "COMMON", "FORK_STEP", "MAIN", "TUNING", "Variant"]

COMMON = (
    "--preset tiny --evaluation.sequences 512 --evaluation.every-steps 0 "
    "--evaluation.sample-prompts --checkpoint.every-steps 0 --checkpoint.keep 1 "
    "--monitor.console quiet"
)
"""The flags of all runs: the quick start (600 steps, 200 of which are a shared data-parallel start), without output."""

FORK_STEP = 199
"""The last step that is the same for all algorithms. One run up to here serves all variants with four replicas."""


@dataclass(frozen=True)
class Variant:
    """One row of a table."""

    name: str
    arguments: str
    inner: str = ""
    """Flags of the inner optimizer if it differs from the quick start's; they also apply to the shared start."""
    replicas: int = 4


def streaming(name: str, *, codec: str = "fp4", more: str = "", inner: str = "") -> Variant:
    """Return Streaming DiLoCo as in the quick start, with the further flags ``more``."""
    return Variant(name, f"--algorithm streaming --codec {codec} {more}".strip(), inner)


def muon(learning_rate: str) -> str:
    """Return the flags for AdamW at ``learning_rate`` and Muon on hidden matrices at ten times that."""
    return f"--optimizer.name Muon --learning-rate {learning_rate}"


MUON = muon("2e-3")
FASTER = muon("8e-3") + " --optimizer.arguments {matrix_lr_ratio=2.5,momentum=0.9}"
"""`MUON` with four times the rate for AdamW, the same rate for hidden matrices, and a momentum of 0.9."""
LONGER = muon("8e-3") + " --optimizer.arguments {matrix_lr_ratio=2.5,momentum=0.85,betas=[0.97,0.99]}"
"""`FASTER` with a longer memory for AdamW and a shorter one for Muon."""


def outer(learning_rate: str, momentum: str) -> str:
    """Return the flags of an outer Nesterov step."""
    return f"--outer-learning-rate {learning_rate} --outer-momentum {momentum}"


MAIN = (
    Variant("data-parallel", "--algorithm data-parallel"),
    Variant("one replica, a quarter of the tokens", "--algorithm data-parallel --replicas 1", replicas=1),
    Variant("DiLoCo", "--algorithm diloco"),
    streaming("Streaming float32", codec="float32"),
    streaming("Streaming float16", codec="float16"),
    streaming("Streaming int8", codec="int8"),
    streaming("Streaming fp4", codec="fp4"),
    Variant("data-parallel, Muon", "--algorithm data-parallel", MUON),
    streaming("Streaming fp4, Muon", more=outer("0.8", "0.5"), inner=MUON),
    Variant("data-parallel, Muon, AdamW lr 8e-3, momentum .9", "--algorithm data-parallel", FASTER),
    streaming("Streaming fp4, Muon, AdamW lr 8e-3, momentum .9", more=outer("0.8", "0.5"), inner=FASTER),
    Variant("data-parallel, Muon, AdamW betas .97/.99, momentum .85", "--algorithm data-parallel", LONGER),
    streaming("Streaming fp4, Muon, AdamW betas .97/.99, momentum .85", more=outer("0.8", "0.6"), inner=LONGER),
)
"""The rows with three seeds."""

SPARSE = "--error-feedback 0.95 --inner-steps 30"
TUNING = (
    streaming("Streaming fp4, Muon, outer .7/.6", more=outer("0.7", "0.6"), inner=MUON),
    streaming("Streaming fp4, Muon, outer .9/.4", more=outer("0.9", "0.4"), inner=MUON),
    Variant("data-parallel, Muon, inner lr 4e-3", "--algorithm data-parallel", muon("4e-3")),
    streaming("Streaming fp4, Muon, inner lr 4e-3", more=outer("0.7", "0.6"), inner=muon("4e-3")),
    Variant("data-parallel, Muon, inner lr 1e-3", "--algorithm data-parallel", muon("1e-3")),
    streaming("Streaming fp4, Muon, inner lr 1e-3", more=outer("0.8", "0.5"), inner=muon("1e-3")),
    Variant("data-parallel, inner lr 4e-3", "--algorithm data-parallel", "--learning-rate 4e-3"),
    streaming("Streaming fp4, inner lr 4e-3", inner="--learning-rate 4e-3"),
    streaming("Streaming fp4, Muon, AdamW betas .97/.99, outer .8/.5", more=outer("0.8", "0.5"), inner=LONGER),
    streaming("Streaming fp4, Muon, AdamW betas .97/.99, outer .9/.6", more=outer("0.9", "0.6"), inner=LONGER),
    streaming("Streaming fp4, Muon, AdamW betas .97/.99, outer .8/.7", more=outer("0.8", "0.7"), inner=LONGER),
    streaming("Streaming fp4, Muon, AdamW betas .97/.99, outer .6/.7", more=outer("0.6", "0.7"), inner=LONGER),
    streaming(
        "Streaming fp4, Muon, AdamW betas .97/.99, tau 0", more=outer("0.8", "0.6") + " --overlap-steps 0", inner=LONGER
    ),
    streaming("Streaming fp4, Muon, tau 0", more=outer("0.8", "0.5") + " --overlap-steps 0", inner=MUON),
    streaming("Streaming fp4, Muon, H=30", more=outer("0.8", "0.5") + " --inner-steps 30", inner=MUON),
    streaming("Streaming topk2, Muon, H=30", codec="topk2", more=f"{outer('0.8', '0.5')} {SPARSE}", inner=MUON),
    streaming("Streaming topk2, H=30", codec="topk2", more=SPARSE),
)
"""Rows with one seed: trials for the rows with Muon, inner learning rates, and topk2. Some were never run."""

ABLATIONS = (
    streaming("Streaming fp4, outer Nesterov lr 0.7", more="--outer-momentum 0.9 --outer-learning-rate 0.7"),
    streaming("Streaming fp4, outer Nesterov mu 0.5 lr 0.7", more="--outer-momentum 0.5 --outer-learning-rate 0.7"),
    streaming("Streaming fp4, outer SGD lr 1", more="--outer-momentum 0 --outer-learning-rate 1.0"),
    streaming("Streaming fp4, H=30", more="--inner-steps 30"),
    streaming("Streaming fp4, tau 0", more="--overlap-steps 0"),
    streaming("Streaming fp4, tau 5", more="--overlap-steps 5"),
    streaming("Streaming fp4, alpha 0", more="--merge-alpha 0"),
    streaming("Streaming fp4, alpha 0.5", more="--merge-alpha 0.5"),
    streaming("Streaming fp4, error feedback", more="--error-feedback 1"),
)
"""Rows with one seed, to be compared with the same seed in the main table."""
