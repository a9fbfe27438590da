"""Resolution of settings: defaults by algorithm, combinations that are refused, and notes on probable mistakes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import SyncSchedule
from diloco.config import build, flatten
from diloco.errors import ConfigurationError
from diloco.train import RunSettings, notes, resolve
from tests.command_lines import dotted


def settings(**values: Any) -> RunSettings:
    """Settings from dotted keys, with ``__`` for the dot."""
    return build(RunSettings, dotted(values))


def resolved(num_layers: int | None = 4, **values: Any) -> RunSettings:
    return resolve(settings(**values), num_layers=num_layers)


def test_defaults_of_each_algorithm() -> None:
    keys = ("num_fragments", "overlap_steps", "merge", "merge_alpha", "codec", "outer_learning_rate")
    expected = {
        "streaming": (3, 1, "rebase", None, "fp4", 0.4),
        "diloco": (1, 0, "alpha", 0.0, "float32", 0.7),
        "data-parallel": (1, 0, "alpha", 0.0, "float32", 0.7),
    }
    for algorithm, wanted in expected.items():
        run = resolved(algorithm=algorithm)
        assert tuple(getattr(run.sync, key) for key in keys) == wanted


@pytest.mark.parametrize(("layers", "fragments"), [(1, 2), (3, 2), (4, 3), (24, 9)])
def test_streaming_takes_one_fragment_per_three_layers_and_one_for_the_rest(layers: int, fragments: int) -> None:
    assert resolved(layers).sync.num_fragments == fragments


def test_alpha_given_means_the_alpha_rule_and_rebase_has_none() -> None:
    def rule_and_alpha(**values: Any) -> tuple[str | None, float | None]:
        sync = resolved(**values).sync
        return sync.merge, sync.merge_alpha

    assert rule_and_alpha(sync__merge_alpha=0.5) == ("alpha", 0.5)
    assert rule_and_alpha(sync__merge="alpha") == ("alpha", 0.0)
    assert rule_and_alpha(sync__merge="rebase") == ("rebase", None)


@pytest.mark.parametrize(("steps", "evaluate", "save"), [(1000, 100, 250), (9, 1, 2), (1, 1, 1)])
def test_intervals_are_shares_of_the_run_and_at_least_one_step(steps: int, evaluate: int, save: int) -> None:
    run = resolved(train__steps=steps, optimizer__warmup_steps=0)
    assert (run.evaluation.every_steps, run.checkpoint.every_steps) == (evaluate, save)
    run = resolved(evaluation__every_steps=0, checkpoint__every_steps=0)
    assert (run.evaluation.every_steps, run.checkpoint.every_steps) == (0, 0)


@given(
    algorithm=st.sampled_from(["streaming", "diloco", "data-parallel", "none"]),
    layers=st.integers(1, 40),
    inner_steps=st.integers(1, 40),
    steps=st.integers(1, 400),
)
def test_defaults_of_every_algorithm_always_fit_together(
    algorithm: str, layers: int, inner_steps: int, steps: int
) -> None:
    run = resolved(
        layers, algorithm=algorithm, sync__inner_steps=inner_steps, train__steps=steps, optimizer__warmup_steps=0
    )
    assert resolve(run, num_layers=layers) == run
    assert run.sync.num_fragments is not None
    SyncSchedule(
        inner_steps=inner_steps, num_fragments=run.sync.num_fragments, overlap_steps=run.sync.overlap_steps or 0
    )


def test_notes_tell_of_runs_that_exchange_nothing() -> None:
    assert notes(resolved(train__steps=10_000)) == ()
    first_send = resolved(train__steps=110, train__data_parallel_steps=10, sync__num_fragments=1)
    assert notes(first_send) == ()
    too_short = resolved(train__steps=110, train__data_parallel_steps=11)
    assert "No fragment is ever sent, so the global parameters do not change: the 99 steps" in notes(too_short)[0]


def test_a_model_of_unknown_depth_needs_a_number_of_fragments() -> None:
    assert resolved(None, sync__num_fragments=90).sync.num_fragments == 90
    assert resolved(None, algorithm="diloco").sync.num_fragments == 1
    with pytest.raises(ConfigurationError, match="must be set, because the depth of this model is unknown"):
        resolved(None)


PEERS = {"network.transport": "swarm", "network.run": "mine"}
RANKS = {"network.transport": "tcp"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    # the schedule and its fragments
    ({"sync.inner_steps": 10, "sync.overlap_steps": 11}, "overlap_steps with inner_steps=10 .* from 0 to 10, got 11"),
    ({"sync.inner_steps": 9, "sync.overlap_steps": 9, "sync.merge_alpha": 0.5}, "overlap_steps=9, a whole round"),
    ({"sync.inner_steps": 2, "sync.num_fragments": 3}, "num_fragments with inner_steps=2 .* from 1 to 2, got 3"),
    ({"sync.num_fragments": 6}, "num_fragments=6 is too many for a model of 4 layers.*1 to 5.*balanced"),
    # what only Streaming DiLoCo can do
    ({"algorithm": "diloco", "sync.num_fragments": 2}, "2 fragments.*Use --algorithm streaming"),
    ({"algorithm": "diloco", "sync.merge_alpha": 0.5}, "alpha=0.5 .* use --algorithm streaming"),
    # what would have no effect without an outer loop
    ({"algorithm": "data-parallel", "sync.codec": "fp4"}, "sync.codec='fp4'.*--codec float32"),
    (
        {"algorithm": "data-parallel", "sync.arguments.average.max_norm": 1.0},
        "max_norm=1.0 .* use --algorithm streaming or diloco",
    ),
    # codecs, averages, merge rules
    ({"sync.codec": "int9"}, "no codec 'int9'; did you mean 'int8'"),
    ({"sync.codec": "topk2"}, "drops 98 % .* Add --error-feedback 0.95"),
    ({"sync.codec": "float32", "sync.error_feedback": 1.0}, "error_feedback.* no loss to feed back"),
    (RANKS | {"sync.arguments.average.max_norm": 1.0, "network.replica_size": 2}, "torch --train.parallelism ddp"),
    (RANKS | {"network.replica_size": 2, "train.parallelism": "ddp"}, "Use --train.parallelism fsdp"),
    ({"sync.merge_alpha": 1.5}, "alpha must be a number from 0 to 1, got 1.5"),
    ({"sync.merge_alpha": 0.0, "sync.merge": "rebase"}, "rebase.* one of the two"),
    # transports
    ({"network.transport": "swarm"}, "'swarm' needs the name of the run. Use --run NAME"),
    ({"network.run": "mine"}, "network.run='mine' .* use --transport swarm"),
    (PEERS | {"algorithm": "data-parallel"}, "algorithm='data-parallel' .* use --transport in-process or tcp"),
    (PEERS | {"network.min_replicas": 5}, "replicas must be at least network.min_replicas=5, got 4"),
    (PEERS | {"data.streaming": True}, "data.streaming=True can't be used with network.transport='swarm'"),
    ({"network.straggler": "dynamic"}, "straggler='dynamic' can't be used with .* use --transport swarm"),
    (RANKS | {"emulate.step_time": (0.1,)}, "step_time can't be used with network.transport='tcp'.*in-process"),
    # one value of each kind that is out of its range
    ({"train.device": "gpu"}, "device='gpu'.*cuda:0"),
    ({"seed": 2**63}, f"seed must be a whole number from 0 to {2**63 - 1}, got {2**63}"),
    ({"train.sequence_length": 1025}, "sequence_length=1025.*at most 1024"),
    ({"train.stop_after": 1001}, "stop_after must be at most train.steps=1000, got 1001"),
    ({"train.steps": 0}, "train.steps must be a whole number of at least 1, got 0"),
    ({"train.batch_size": 8, "train.gradient_accumulation": 7}, "gradient_accumulation=7 must divide .*=8"),
    ({"optimizer.learning_rate": float("nan")}, "optimizer.learning_rate must be a finite number above 0, got nan"),
    ({"sync.outer_momentum": 1.0}, "momentum must be a number of at least 0 and below 1, got 1.0"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_impossible_combinations_are_refused_and_say_what_would_work(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        resolve(build(RunSettings, dotted(values)), num_layers=4)


ALLOWED: list[dict[str, Any]] = [
    {"sync.inner_steps": 10, "sync.overlap_steps": 9},
    {"sync.num_fragments": 5},
    {"sync.num_fragments": 50, "sync.fragment_strategy": "balanced"},
    {"algorithm": "diloco", "sync.num_fragments": 1, "sync.overlap_steps": 0, "sync.merge_alpha": 0.0},
    {"sync.codec": "topk2", "sync.error_feedback": 1.0},
    {"algorithm": "data-parallel", "sync.codec": "bfloat16"},
    {"sync.merge_alpha": 1.0},
    {"train.stop_after": 1000, "optimizer.warmup_steps": 1000, "train.data_parallel_steps": 1000},
    {"train.sequence_length": 1024},
    {"train.device": "cuda:12"},
    {"optimizer.clip_norm": None},
    {"sync.arguments": {"codec": {"block_size": 65536}}},
    {"network.transport": "tcp", "algorithm": "data-parallel"},
]


@pytest.mark.parametrize("values", ALLOWED, ids=[" ".join(values) for values in ALLOWED])
def test_limits_themselves_are_allowed_and_resolving_twice_changes_nothing(values: dict[str, Any]) -> None:
    once = resolve(build(RunSettings, dotted(values)), num_layers=4)
    assert resolve(once, num_layers=4) == once
    assert {name: flatten(once)[name] for name in values} == values
