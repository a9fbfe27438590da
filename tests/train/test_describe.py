"""The facts printed before a run agree with the components of the run."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.algorithm import MeanEncoding, data_parallel_bytes, make_codec, partition, plan_exchange
from diloco.config import build
from diloco.model import ModelSettings, Transformer, build_model
from diloco.train import RunSettings, describe, resolve
from diloco.units import format_bytes, format_ratio
from tests.command_lines import dotted

MODEL = ModelSettings(layers=4, width=16, ffn_width=32, heads=2, vocab_size=257)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build_model(MODEL, seed=0, device="meta")


def facts_of(model: Transformer, **values: Any) -> dict[str, str]:
    return describe(resolve(build(RunSettings, dotted(values)), num_layers=4), model)


def test_rounds_and_bytes_are_those_of_the_schedule_and_the_exchange(model: Transformer) -> None:
    facts = facts_of(model, sync__inner_steps=10, train__steps=100, network__replicas=3, sync__codec="int8")
    # P=3: offsets 0, 3, 6; sends at 10..100, 13..93, 16..96
    assert facts["rounds"] == "28 in all (10, 9, 9 by fragment)"
    assert facts["schedule"] == "fragment 0 at step 10, 1 at 13, 2 at 16, then every 10 steps; merged 1 step later"
    codec = make_codec("int8", block_size=256)
    sizes = [fragment.numel for fragment in partition(model, num_fragments=3)]
    sent = sum(n * plan_exchange(codec, size, 3).mean_bytes for n, size in zip((10, 9, 9), sizes, strict=True))
    baseline = data_parallel_bytes(sum(sizes), 3, 1)
    assert facts["traffic"] == (
        f"{format_bytes(sent / 100)} per replica and step each way; data-parallel: {format_bytes(baseline)}, "
        f"{format_ratio(baseline * 100 / sent)} as much"
    )


def test_the_exchange_and_its_bytes_are_those_of_the_plan(model: Transformer) -> None:
    """With sixteen replicas in fp4, means in fp4 take a sixth of the bytes."""
    codec, sizes = make_codec("fp4", block_size=64), [f.numel for f in partition(model, num_fragments=3)]
    many = {"network__replicas": 16, "sync__arguments__codec__block_size": 64}
    plain = facts_of(model, **many, sync__arguments__average__codec="float32")
    by_itself = facts_of(model, **many)
    means = facts_of(model, **many, sync__arguments__average__codec="fp4")
    for facts, name, words in (
        (plain, "float32", "float32"),
        (by_itself, "int8", "int8 (block_size 256)"),
        (means, "fp4", "fp4 (block_size 64)"),
    ):
        mean = MeanEncoding(make_codec(name, **({"block_size": 64} if name == "fp4" else {})))
        plans = [plan_exchange(codec, size, 16, mean=mean) for size in sizes]
        moved = ", ".join(format_bytes(plan.mean_bytes) for plan in plans)
        assert facts["exchange"] == f"reduce-scatter with means as {words}: {moved} per replica and round each way"
    assert facts_of(model)["exchange"].startswith("all-gather: ")


def test_a_shared_start_shifts_the_schedule_and_is_counted_apart(model: Transformer) -> None:
    facts = facts_of(
        model,
        algorithm="diloco",
        sync__inner_steps=10,
        train__steps=35,
        train__data_parallel_steps=20,
        optimizer__warmup_steps=0,
    )
    assert facts["algorithm"] == "DiLoCo, after 20 shared data-parallel steps"
    assert facts["schedule"] == "the whole model at step 30, then every 10 steps; merged at once"
    assert facts["rounds"] == "1 in all (1 by fragment)"
    assert " for the shared start)" in facts["traffic"]


def test_a_run_of_nothing_but_a_shared_start_sends_no_fragment(model: Transformer) -> None:
    facts = facts_of(model, train__steps=5, train__data_parallel_steps=5, optimizer__warmup_steps=0)
    assert facts["rounds"] == "0 in all (0, 0, 0 by fragment)"
    assert facts["traffic"].startswith("0 B per replica and step each way")


def test_every_fragment_is_named_up_to_four_and_the_last_beyond(model: Transformer) -> None:
    many = facts_of(model, sync__num_fragments=6, sync__fragment_strategy="balanced", sync__inner_steps=6)
    assert many["schedule"] == "fragment 0 at step 6, 1 at 7, ..., 5 at 11, then every 6 steps; merged 1 step later"


@pytest.mark.parametrize(
    ("values", "bytes_per_parameter"),
    [
        ({}, 24),
        ({"sync__error_feedback": True}, 28),
        ({"sync__outer": "sgd"}, 20),
        ({"sync__outer": "adam"}, 28),
        ({"algorithm": "data-parallel"}, 16),
        ({"algorithm": "none"}, 16),
    ],
)
def test_memory(model: Transformer, values: dict[str, Any], bytes_per_parameter: int) -> None:
    total = format_bytes(bytes_per_parameter * model.num_parameters() * 4)
    shown = facts_of(model, **values)["memory"]
    assert shown.startswith(f"{total} for 4 replicas at {bytes_per_parameter} bytes per parameter")


def test_baselines_say_what_travels(model: Transformer) -> None:
    assert facts_of(model, algorithm="none")["traffic"] == "none"
    facts = facts_of(model, algorithm="data-parallel", sync__codec="bfloat16")
    assert facts["gradients"] == "averaged at every step, as bfloat16"
    assert "fragments" not in facts


def test_intervals(model: Transformer) -> None:
    facts = facts_of(model, evaluation__every_steps=0, checkpoint__every_steps=7)
    assert facts["evaluation"] == "at the end"
    assert facts["checkpoints"] == "every 7 steps and at the end, the last 2 kept"
