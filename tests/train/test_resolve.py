"""Resolution of settings: defaults by algorithm, and notes on runs that are probably a mistake."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.algorithm import SyncSchedule
from diloco.config import build
from diloco.errors import ConfigurationError
from diloco.train import CODEC_NAMES, RunSettings, notes, resolve
from tests.algorithm.codecs import OURS
from tests.command_lines import dotted


def settings(**values: Any) -> RunSettings:
    """Settings from dotted keys, with ``__`` for the dot."""
    return build(RunSettings, dotted(values))


def resolved(num_layers: int | None = 4, **values: Any) -> RunSettings:
    return resolve(settings(**values), num_layers=num_layers)


def test_defaults_of_each_algorithm() -> None:
    keys = ("num_fragments", "overlap_steps", "rule", "alpha", "name", "learning_rate")
    sections = ("fragments", "schedule", "merge", "merge", "codec", "outer")
    expected = {
        "streaming": (3, 1, "rebase", None, "fp4", 0.4),
        "diloco": (1, 0, "alpha", 0.0, "float32", 0.7),
        "data-parallel": (1, 0, "alpha", 0.0, "float32", 0.7),
        "none": (1, 0, "alpha", 0.0, "float32", 0.7),
    }
    for algorithm, wanted in expected.items():
        run = resolved(algorithm=algorithm)
        assert tuple(getattr(getattr(run, s), k) for s, k in zip(sections, keys, strict=True)) == wanted


@pytest.mark.parametrize(
    ("layers", "fragments"), [(1, 2), (3, 2), (4, 3), (6, 3), (7, 4), (24, 9), (48, 17), (108, 37)]
)
def test_streaming_takes_one_fragment_per_three_layers_and_one_for_the_rest(layers: int, fragments: int) -> None:
    assert resolved(layers).fragments.num_fragments == fragments


def test_default_fragments_and_overlap_fit_into_a_short_cycle() -> None:
    run = resolved(108, sync__inner_steps=1)
    assert (run.sync.num_fragments, run.sync.overlap_steps) == (1, 0)
    assert resolved(108, sync__inner_steps=2).fragments.num_fragments == 2


def test_number_of_fragments_follows_patterns() -> None:
    patterns = (("layers.*",), ("*",))
    run = resolved(sync__fragment_strategy="patterns", fragments__patterns=patterns)
    assert run.sync.num_fragments == 2


def test_alpha_given_means_the_alpha_rule_and_rebase_has_none() -> None:
    def rule_and_alpha(**values: Any) -> tuple[str | None, float | None]:
        merge = resolved(**values).merge
        return merge.rule, merge.alpha

    assert rule_and_alpha(sync__merge_alpha=0.5) == ("alpha", 0.5)
    assert rule_and_alpha(sync__merge="alpha") == ("alpha", 0.0)
    assert rule_and_alpha(sync__merge="rebase") == ("rebase", None)


@pytest.mark.parametrize(("steps", "evaluate", "save"), [(1000, 100, 250), (9, 1, 2), (1, 1, 1)])
def test_intervals_are_shares_of_the_run_and_at_least_one_step(steps: int, evaluate: int, save: int) -> None:
    run = resolved(train__steps=steps, optimizer__warmup_steps=0)
    assert (run.evaluation.every_steps, run.checkpoint.every_steps) == (evaluate, save)
    run = resolved(evaluation__every_steps=0, checkpoint__every_steps=0)
    assert (run.evaluation.every_steps, run.checkpoint.every_steps) == (0, 0)


def test_decay_of_wsd_is_a_fifth_of_the_run_and_never_overlaps_the_warm_up() -> None:
    assert resolved(optimizer__schedule="wsd").inner.decay_steps == 200
    assert resolved(optimizer__schedule="wsd", optimizer__warmup_steps=950).inner.decay_steps == 50
    assert resolved(optimizer__schedule="cosine").inner.decay_steps is None


def test_a_data_parallel_run_has_no_start_of_its_own_and_independent_replicas_keep_it() -> None:
    assert resolved(algorithm="data-parallel", train__data_parallel_steps=5).train.data_parallel_steps == 0
    assert resolved(algorithm="none", train__data_parallel_steps=5).train.data_parallel_steps == 5


def test_data_parallel_and_none_take_a_schedule_and_fragments_so_that_comparisons_are_one_flag() -> None:
    for algorithm in ("data-parallel", "none"):
        run = resolved(algorithm=algorithm, sync__inner_steps=10, sync__num_fragments=3)
        assert run.sync.num_fragments == 3
        assert run.sync.overlap_steps == 0


def test_the_type_is_kept() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wider(RunSettings):
        label: str = "x"

    run = resolve(Wider(label="mine"), num_layers=4)
    assert isinstance(run, Wider)
    assert run.label == "mine"


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
        layers,
        algorithm=algorithm,
        sync__inner_steps=inner_steps,
        train__steps=steps,
        optimizer__warmup_steps=0,
    )
    assert resolve(run, num_layers=layers) == run
    assert run.sync.num_fragments is not None
    SyncSchedule(
        inner_steps=inner_steps,
        num_fragments=run.sync.num_fragments,
        overlap_steps=run.sync.overlap_steps or 0,
    )


def test_a_gain_is_another_way_to_give_the_outer_learning_rate() -> None:
    run = resolved(outer__gain=4.0)
    assert (run.sync.outer_learning_rate, run.outer.gain) == (0.4, None)
    assert resolve(run) == run, "resolving is idempotent"
    assert resolved(outer__gain=1.75, sync__outer_momentum=0.6).outer.learning_rate == 0.7
    assert resolved(sync__outer="sgd", outer__gain=1.5).outer.learning_rate == 1.5
    assert resolved(sync__outer="sgd", outer__gain=1.5).outer.lasting_gain == 1.5
    assert resolved(sync__outer="adam").outer.lasting_gain is None
    with pytest.raises(
        ConfigurationError, match=r"outer.gain=4 can't be combined with sync.outer_learning_rate=0.5, because the gain"
    ):
        resolved(outer__gain=4.0, sync__outer_learning_rate=0.5)
    with pytest.raises(
        ConfigurationError, match=r"outer.gain=4 can't be used with sync.outer='adam', which has no gain"
    ):
        resolved(outer__gain=4.0, sync__outer="adam")


def test_a_high_gain_and_few_rounds_are_noted() -> None:
    steps = {"sync__inner_steps": 10, "train__steps": 490}
    assert "a gain of 4 but only 49 rounds per fragment" in notes(resolved(**steps))[0]
    for fits in (
        steps | {"train__steps": 500},
        steps | {"outer__gain": 2.0},
        steps | {"sync__outer": "adam"},
        steps | {"train__data_parallel_steps": 1},
        steps | {"algorithm": "data-parallel"},
    ):
        assert notes(resolved(**fits)) == ()


def test_fragments_that_are_never_sent_are_named() -> None:
    """P = 3, H = 100: first sent after 100, 133 and 166 steps."""
    run = resolved(train__steps=140, optimizer__warmup_steps=0, outer__gain=1.0)
    assert notes(run)[0].startswith("Fragment 2 is never sent in the 140 steps, so its global parameters do not change")
    assert "first sent after step 166" in notes(run)[0]
    assert notes(resolved(train__steps=166, optimizer__warmup_steps=0, outer__gain=1.0)) == ()


def test_notes_tell_of_runs_that_exchange_nothing() -> None:
    assert notes(resolved(train__steps=10_000)) == ()
    assert "trains alone" in notes(resolved(sync__merge_alpha=1.0))[0]
    assert "a single replica" in notes(resolved(network__replicas=1, train__steps=10_000))[0]
    first_send = resolved(train__steps=110, train__data_parallel_steps=10, sync__num_fragments=1)
    assert notes(first_send) == ()
    too_short = resolved(train__steps=110, train__data_parallel_steps=11)
    assert "No fragment is ever sent, so the global parameters do not change: the 99 steps" in notes(too_short)[0]
    assert notes(resolved(algorithm="none", train__steps=99, optimizer__warmup_steps=0, network__replicas=1)) == ()


def test_codec_names_are_those_of_the_registry() -> None:

    assert sorted(CODEC_NAMES) == sorted(OURS)


def test_a_model_of_unknown_depth_needs_a_number_of_fragments() -> None:
    assert resolved(None, sync__num_fragments=90).fragments.num_fragments == 90
    assert resolved(None, algorithm="diloco").fragments.num_fragments == 1
    with pytest.raises(ConfigurationError, match="must be set, because the depth of this model is unknown"):
        resolved(None)
