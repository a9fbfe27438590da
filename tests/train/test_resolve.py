"""Resolution of settings: defaults, combinations that are refused, notes on probable mistakes; what a run then is."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import SyncSchedule, SyncSettings, at
from diloco.config import build, flatten
from diloco.errors import ConfigurationError
from diloco.model import DecoderSettings, build_model
from diloco.train import RunSettings, identity, notes, outer_components, resolve
from diloco.units import diff
from tests.command_lines import dotted


def resolved(num_layers: int | None = 4, **values: Any) -> RunSettings:
    """Settings from dotted keys, with ``__`` for the dot."""
    return resolve(build(RunSettings, dotted(values)), num_layers=num_layers)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"algorithm": "streaming"}, "3 1 rebase None fp4 0.4"),
        ({"algorithm": "diloco"}, "1 0 alpha 0.0 float32 0.7"),
        ({"algorithm": "data-parallel"}, "1 0 alpha 0.0 float32 0.7"),
        ({"num_layers": 1}, "2 1 rebase None fp4 0.4"),  # one fragment per three layers, and one for the rest
        ({"num_layers": 3}, "2 1 rebase None fp4 0.4"),
        ({"num_layers": 24}, "9 1 rebase None fp4 0.4"),
        ({"num_layers": None, "sync__num_fragments": 90}, "90 1 rebase None fp4 0.4"),
        ({"num_layers": None, "algorithm": "diloco"}, "1 0 alpha 0.0 float32 0.7"),
        ({"sync__merge_alpha": 0.5}, "3 1 alpha 0.5 fp4 0.4"),
        ({"sync__merge": "alpha"}, "3 1 alpha 0.0 fp4 0.4"),
    ],
)
def test_defaults_follow_from_the_algorithm_the_model_and_what_is_given(values: dict[str, Any], expected: str) -> None:
    sync = resolved(**values).sync
    merge = f"{sync.merge} {sync.merge_alpha} {sync.codec} {sync.outer_learning_rate}"
    assert f"{sync.num_fragments} {sync.overlap_steps} {merge}" == expected


@pytest.mark.parametrize(("steps", "evaluate", "save"), [(1000, 100, 250), (9, 1, 2), (1, 1, 1)])
def test_intervals_are_shares_of_the_run_and_at_least_one_step(steps: int, evaluate: int, save: int) -> None:
    run = resolved(train__steps=steps, optimizer__warmup_steps=0)
    assert (run.evaluation.every_steps, run.checkpoint.every_steps) == (evaluate, save)


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


PEERS = {"network.transport": "swarm", "network.run": "mine"}
RANKS = {"network.transport": "tcp"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    # the schedule and its fragments
    ({"sync.inner_steps": 10, "sync.overlap_steps": 11}, "overlap_steps with inner_steps=10 .* from 0 to 10, got 11"),
    ({"sync.inner_steps": 9, "sync.overlap_steps": 9, "sync.merge_alpha": 0.5}, "overlap_steps=9, a whole round"),
    ({"sync.inner_steps": 2, "sync.num_fragments": 3}, "num_fragments with inner_steps=2 .* from 1 to 2, got 3"),
    ({"sync.num_fragments": 6}, "num_fragments=6 is too many for a model of 4 layers.*1 to 5.*balanced"),
    ({"num_layers": None}, "num_fragments must be set, because the depth of this model is unknown"),
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
    ({"sync.arguments.average.codec": 3}, "There is no codec 3; use one of"),
    ({"sync.arguments.average.weight": "rows"}, "average.weight must be tokens, equal, or a number, got 'rows'"),
    ({"sync.codec": "sign"}, "leaves out the magnitudes, which are lost .* Add --error-feedback 1, for"),
    ({"sync.arguments.average.codec": "topk2"}, "leaves out much .* means have no error feedback. Use another"),
    ({"sync.codec": "topk2"}, "leaves out 98 % .* Add --error-feedback 0.95"),
    ({"sync.codec": "float32", "sync.error_feedback": 1.0}, "error_feedback.* no loss to feed back"),
    (RANKS | {"sync.arguments.average.max_norm": 1.0, "network.replica_size": 2}, "torch --train.parallelism ddp"),
    (RANKS | {"network.replica_size": 2, "train.parallelism": "ddp"}, "Use --train.parallelism fsdp"),
    ({"sync.merge_alpha": 1.5}, "alpha must be a number from 0 to 1, got 1.5"),
    ({"sync.merge_alpha": 0.0, "sync.merge": "rebase"}, "rebase.* one of the two"),
    # transports
    ({"network.transport": "swarm"}, "'swarm' needs the name of the run. Use --run NAME"),
    ({"network.run": "mine"}, "network.run='mine' .* use --transport swarm"),
    (PEERS | {"algorithm": "data-parallel"}, "algorithm='data-parallel' .* use --transport in-process or torch or tcp"),
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
        resolved(**values)


ALLOWED: list[dict[str, Any]] = [
    {"sync.inner_steps": 10, "sync.overlap_steps": 9, "sync.num_fragments": 5, "sync.merge_alpha": 1.0},
    {"train.stop_after": 1000, "optimizer.warmup_steps": 1000, "train.data_parallel_steps": 1000},
    {"train.sequence_length": 1024, "train.device": "cuda:12", "optimizer.clip_norm": None, "sync.codec": "topk2",
     "sync.error_feedback": 1.0, "sync.num_fragments": 50, "sync.fragment_strategy": "balanced"},
    {"algorithm": "diloco", "sync.num_fragments": 1, "sync.overlap_steps": 0, "sync.merge_alpha": 0.0},
    {"algorithm": "data-parallel", "network.transport": "tcp", "sync.codec": "bfloat16"},
]  # fmt: skip


@pytest.mark.parametrize("values", ALLOWED)
def test_limits_themselves_are_allowed_and_resolving_twice_changes_nothing(values: dict[str, Any]) -> None:
    once = resolved(**values)
    assert resolve(once, num_layers=4) == once
    assert {name: flatten(once)[name] for name in values} == values


def test_what_two_runs_do_not_have_in_common_is_named() -> None:
    sizes = DecoderSettings(layers=4, width=16, ffn_width=32, heads=2, vocab_size=257)
    model = build_model(sizes, seed=0, device="meta")

    def identity_of(data: str = "data", **values: Any) -> dict[str, str]:
        return identity(resolved(**values), model, data)

    base = identity_of()
    assert base == identity_of()
    for other, name in (
        (identity_of(sync__codec="int8"), "codec"),
        (identity_of(sync__inner_steps=7), "schedule"),
        (identity_of(algorithm="diloco"), "algorithm"),
        (identity_of(train__steps=7, optimizer__warmup_steps=0), "steps"),
        (identity_of(seed=7), "seed"),
        (identity_of("others"), "data"),
    ):
        assert diff(base, other, "this", "that").startswith(f"this has {name} = ")


NESTEROV = "The outer optimizer 'nesterov' has no parameter"
MISPLACED: list[tuple[dict[str, Any], str]] = [
    # the message names what the table may have, not what has settings of its own
    ({"outer": {"isotropik": True}}, f"{NESTEROV} 'isotropik'; did you mean 'isotropic'"),
    ({"outer": {"rate": 1}}, "use one of: final_ratio, isotropic, momentum_warmup, schedule"),
    ({"average": {"maxnorm": 1}}, "The average 'mean' has no parameter 'maxnorm'; did you mean 'max_norm'"),
    # these overrode what the run prints, or were ignored
    ({"outer": {"learning_rate": 0.1}}, f"{NESTEROV} 'learning_rate'; set sync.outer_learning_rate"),
    ({"outer": {"momentum": 0.1, "momentum_warmup": 5}}, f"{NESTEROV} 'momentum'; set sync.outer_momentum"),
    ({"outer": {"final_ratio": 7}}, "sync.arguments.outer.final_ratio must be a number from 0 to 1, got 7"),
    # these named values that other settings have
    ({"outer": {"schedule": "wsd"}}, "sync.arguments.outer.schedule='wsd' is unknown; .* constant, cosine, linear"),
    ({"outer": {"momentum_warmup": 3}}, r"'sgd' has no parameter 'momentum_warmup'; use one of: final_ratio"),
    ({"outer": {"momentum_warmup": 0.5}}, "sync.arguments.outer.momentum_warmup must be a whole number"),
]


@pytest.mark.parametrize(("arguments", "words"), MISPLACED)
def test_an_argument_that_a_component_does_not_take_is_refused_by_its_name(
    arguments: dict[str, Any], words: str
) -> None:
    kind = {"outer": "sgd"} if "'sgd'" in words else {}
    with pytest.raises(ConfigurationError, match=words):
        outer_components(SyncSettings(arguments=arguments, **kind))


@pytest.mark.parametrize(("name", "kind"), [("sgd", "linear"), ("nesterov", "cosine")])
def test_the_learning_rate_falls_over_the_outer_steps_of_the_run(name: str, kind: str) -> None:
    """Over ten rounds of a fragment, the rate starts at the peak and is half-way to its end value at five."""
    arguments = {"outer": {"schedule": kind, "final_ratio": 0.25}}
    settings = SyncSettings(outer=name, outer_learning_rate=0.8, arguments=arguments)
    rate = outer_components(settings, 10)["outer_optimizer"].learning_rate
    assert [at(rate, step) for step in (0, 5, 10, 12)] == pytest.approx([0.8, 0.5, 0.2, 0.2])
