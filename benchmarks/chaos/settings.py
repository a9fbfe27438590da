"""The run that is disturbed: its training text, its command line and its time limits."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

COMMON = (
    "--model.arguments {layers=2,width=32,ffn_width=64,heads=2} --sequence-length 64 "
    "--batch-size 4 --learning-rate 3e-3 --optimizer.warmup-steps 20 --data-parallel-steps 0 --inner-steps 15 "
    "--fragments 3 --overlap-steps 3 --evaluation.every-steps 0 --evaluation.sequences 256 "
    "--evaluation.sample-prompts --device cpu --monitor.console quiet"
)
"""Arguments of all runs, also of the undisturbed ones: 2 layers of width 32 on bytes; H = 15, P = 3, tau = 3."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the run; those not described here are settings of ``diloco train``.

    Attributes:
        step_s: the least duration of an inner step.
        leaves_s: the longest time that a peer may take to end after a signal.
        slack_s: the time that a busy machine may add to any limit.
    """

    transport: str = "swarm"
    peers: int = 5
    steps: int = 5000
    step_s: float = 0.2
    checkpoint_steps: int = 100
    silence_s: float = 8.0
    round_timeout_s: float = 30.0
    straggler: str = "skip"
    leaves_s: float = 30.0
    slack_s: float = 10.0

    @property
    def stall_limit_s(self) -> float:
        """The longest step of an undisturbed peer: a round, in which one more member may turn out to be silent."""
        return self.round_timeout_s + self.silence_s + self.slack_s

    @property
    def round_gap_limit_s(self) -> float:
        """The longest time between two committed rounds: one may be void, and the next one late as well."""
        return 2 * self.stall_limit_s

    @property
    def recovery_limit_s(self) -> float:
        """The longest time until a peer contributes to a round after it was started, thawed or healed."""
        return 2 * self.silence_s + self.round_timeout_s + self.stall_limit_s

    def arguments(self) -> list[str]:
        """Return the arguments that all peers share: all but its number, addresses and folder."""
        where = (
            f"--transport tcp --replicas {self.peers} --on-loss continue"
            if self.transport == "tcp"
            else f"--transport swarm --run chaos --replicas {self.peers} --network.straggler {self.straggler}"
        )
        words = (
            f"{COMMON} --steps {self.steps} {where} "
            f"--network.min-replicas 2 "
            f"--network.silence {self.silence_s}s --network.round-timeout {self.round_timeout_s}s "
            f"--checkpoint.every-steps {self.checkpoint_steps}"
        )
        return words.split()


def write_text(folder: Path, *, documents: int = 1500, seed: int = 0) -> Path:
    """Write a .jsonl of short documents, drawn from a Markov chain of made-up words, from which a model can learn."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("aeiou" if place % 2 else "bdfgklmnprst") for place in range(4)) for _ in range(120)]
    follows = {word: rng.sample(words, 6) for word in words}
    path = folder / "text.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for _ in range(documents):
            text = [rng.choice(words)]
            while len(text) < 60:
                text.append(rng.choice(follows[text[-1]]))
            file.write(json.dumps({"text": " ".join(text) + "."}) + "\n")
    return path
