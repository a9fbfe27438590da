"""Combinations of settings that are refused, with what would work, and limits that are allowed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.algorithm import make_codec
from diloco.config import build, flatten
from diloco.errors import ConfigurationError
from diloco.train import RunSettings, resolve

REFUSED: list[tuple[dict[str, Any], str]] = [
    # the schedule
    ({"schedule.inner_steps": 0}, "inner_steps must be at least 1, got 0"),
    ({"schedule.inner_steps": 10, "schedule.overlap_steps": 11}, "overlap_steps must be from 0 to 10 .* got 11"),
    (
        {"schedule.inner_steps": 9, "schedule.overlap_steps": 9, "merge.alpha": 0.5},
        "overlap_steps=9, a whole round late",
    ),
    ({"schedule.overlap_steps": -1}, "overlap_steps must be from 0 to 100 .* got -1"),
    ({"schedule.inner_steps": 2, "fragments.num_fragments": 3}, "num_fragments must be from 1 to 2 .* got 3"),
    ({"fragments.num_fragments": 0}, "num_fragments must be at least 1, got 0"),
    ({"fragments.num_fragments": 6}, "num_fragments=6 is too many for a model of 4 layers.*1 to 5.*balanced"),
    (
        {"fragments.num_fragments": 6, "fragments.strategy": "sequential"},
        "num_fragments=6 is too many for a model of 4 layers.*1 to 5",
    ),
    ({"fragments.num_fragments": 2, "schedule.offsets": (0,)}, "offsets must be 2 values from 0 to 99"),
    ({"fragments.num_fragments": 1, "schedule.offsets": (100,)}, "offsets must be .* from 0 to 99"),
    ({"fragments.num_fragments": 1, "schedule.offsets": (-1,)}, "offsets must be .* from 0 to 99"),
    (
        {"fragments.strategy": "patterns", "fragments.patterns": (("*",),), "fragments.num_fragments": 2},
        "num_fragments must match the 1 lists.*got 2. Use 1, or leave it out",
    ),
    # settings that only Streaming DiLoCo supports
    ({"algorithm": "diloco", "fragments.num_fragments": 2}, "2 fragments.*Use --algorithm streaming"),
    ({"algorithm": "diloco", "schedule.overlap_steps": 1}, "overlap_steps=1.*Use --algorithm streaming"),
    ({"algorithm": "diloco", "merge.alpha": 0.5}, "alpha=0.5.*Use --algorithm streaming"),
    ({"algorithm": "diloco", "merge.rule": "rebase"}, "rebase.*Use --algorithm streaming"),
    (
        {"algorithm": "diloco", "fragments.strategy": "patterns", "fragments.patterns": (("a",), ("*",))},
        "2 fragments.*Use --algorithm streaming",
    ),
    # settings that would be ignored without an outer loop
    ({"algorithm": "data-parallel", "codec.name": "fp4"}, "codec.name='fp4'.*--codec float32"),
    ({"algorithm": "data-parallel", "codec.name": "int8"}, "codec.name='int8'.*float32, float16, bfloat16"),
    ({"algorithm": "none", "codec.name": "float16"}, "float16.* independent replicas send nothing"),
    ({"algorithm": "data-parallel", "schedule.overlap_steps": 2}, "overlap_steps=2.*--algorithm streaming"),
    ({"algorithm": "none", "merge.alpha": 0.5}, "alpha=0.5.*--algorithm streaming"),
    # codec
    ({"codec.name": "int9"}, "codec.name='int9'.*did you mean 'int8'"),
    ({"codec.name": "zip"}, "codec.name='zip'.*bfloat16, float16, float32, fp4, int8, topk2"),
    ({"codec.name": "topk2"}, "drops 98 % .* Add --codec.error-feedback"),
    ({"codec.block_size": 0}, "block_size must be an even number from 2 to 65536, got 0"),
    ({"codec.block_size": 7}, "block_size must be an even number from 2 to 65536, got 7"),
    ({"codec.block_size": 65538}, "block_size must be an even number from 2 to 65536, got 65538"),
    ({"codec.name": "float32", "codec.error_feedback": True}, "error_feedback.* no loss to feed back"),
    ({"transport.mean_codec": "fp4", "algorithm": "data-parallel"}, "mean_codec='fp4'.*only the means of streaming"),
    ({"transport.mean_codec": "int8", "algorithm": "none"}, "mean_codec='int8'.*only the means of streaming"),
    (
        {"algorithm": "data-parallel", "codec.name": "float16", "codec.error_feedback": True},
        "error_feedback.* no loss to feed back",
    ),
    # clipping and averaging
    ({"outer.max_norm": 1.0, "algorithm": "data-parallel"}, "only streaming and diloco send contributions"),
    ({"outer.max_norm": 1.0, "transport.name": "torch", "transport.replica_size": 2}, "Use --train.parallelism ddp"),
    ({"outer.average": "senders", "algorithm": "data-parallel"}, "only streaming and diloco send contributions"),
    ({"outer.average": "rds"}, "outer.average='rds' is unknown; .*senders"),
    ({"outer.average_arguments": {"a": 1}}, "outer.average_arguments can't be used with outer.average='mean'"),
    # merge
    ({"merge.alpha": 1.5}, "alpha must be a number from 0 to 1, got 1.5"),
    ({"merge.alpha": -0.1}, "alpha must be a number from 0 to 1, got -0.1"),
    ({"merge.alpha": float("nan")}, "alpha must be a number from 0 to 1, got nan"),
    ({"merge.alpha": 0.0, "merge.rule": "rebase"}, "rebase.* one of the two"),
    # transports and paths
    ({"transport.name": "hivemind"}, "'hivemind' needs the name of the run. Use --run NAME"),
    (
        {"swarm.run": "mine"},
        "swarm.run='mine' can't be used with transport.name='in-process'. Use --transport hivemind",
    ),
    (
        {"transport.name": "hivemind", "swarm.run": "mine", "algorithm": "data-parallel"},
        "replicas that join and leave can't average gradients at every step",
    ),
    (
        {"transport.name": "hivemind", "swarm.run": "mine", "transport.min_replicas": 2},
        "start_replicas must be at least transport.min_replicas=2, got 1. Use --start-replicas 2",
    ),
    (
        {"transport.name": "hivemind", "swarm.run": "m", "swarm.straggler": "skip", "swarm.join_window_s": 3.9},
        "join_window_s must be at least 4 s with transport.heartbeat_s=2, got 3.9",
    ),
    (
        {"transport.name": "hivemind", "swarm.run": "m", "swarm.straggler": "grace", "swarm.join_window_s": 3.9},
        "join_window_s must be at least 4 s with transport.heartbeat_s=2, got 3.9",
    ),
    ({"swarm.straggler": "grace"}, "straggler='grace' can't be used with .*Use --transport hivemind"),
    ({"swarm.dynamic_steps": True}, "dynamic_steps=true can't be used with .*Use --transport hivemind"),
    (
        {"swarm.dynamic_steps": True, "transport.name": "torch"},
        "dynamic_steps=true can't be used with .*Use --transport hivemind",
    ),
    (
        {"transport.name": "hivemind", "swarm.run": "mine", "data.streaming": True},
        "data.streaming=true can't be used with transport.name='hivemind'",
    ),
    (
        {
            "transport.name": "torch",
            "transport.restarts": 1,
            "transport.on_failure": "continue",
            "data.streaming": True,
        },
        "transport.restarts=1 can't be used with data.streaming",
    ),
    (
        {"transport.name": "hivemind", "swarm.run": "mine", "transport.latency_s": (0.1,)},
        r"latency_s=.* Use \(\)",
    ),
    ({"transport.name": "hivemind", "swarm.run": "mine", "transport.host": "::1"}, "host='::1' .* Use None"),
    (
        {"transport.name": "hivemind", "swarm.run": "mine", "data.sharding": "contiguous"},
        "sharding=.* Use 'shuffled'",
    ),
    (
        {"transport.name": "torch", "transport.faults": ("drop replica=0 fragment=0 outer_step=0",)},
        "faults can't be used with transport.name='torch'.*--transport in-process, or leave it out",
    ),
    (
        {"transport.name": "torch", "transport.step_time_s": (0.1,)},
        "step_time_s can't be used with transport.name='torch'.*--transport in-process, or leave it out",
    ),
    (
        {"transport.name": "torch", "algorithm": "none"},
        "algorithm='none' sends nothing and .* transport.name='torch'. Use --transport in-process",
    ),
    ({"train.device": "gpu"}, "device='gpu'.*cuda:0"),
    ({"train.device": "cuda:"}, "device='cuda:'.*cuda:0"),
    ({"train.threads": 0}, "threads must be at least 1, got 0"),
    ({"checkpoint.resume": Path("a"), "train.init_from": Path("b")}, "resume=a can't be combined with .*init_from=b"),
    # seeds
    ({"seed": -1}, r"seed must be a number from 0 to 2\*\*63 - 1, got -1"),
    ({"seed": 2**63}, rf"seed must be a number from 0 to 2\*\*63 - 1, got {2**63}"),
    # lengths
    ({"train.sequence_length": 1025}, "sequence_length=1025.*at most 1024"),
    ({"train.stop_after": 1001}, "stop_after must be from 1 to train.steps=1000, got 1001"),
    ({"inner.warmup_steps": 1001}, "warmup_steps must be from 0 to train.steps=1000, got 1001"),
    ({"inner.warmup_steps": -1}, "warmup_steps must be from 0 to train.steps=1000, got -1"),
    ({"inner.schedule": "wsd", "inner.decay_steps": 901}, "decay_steps must be from 0 to 900.*got 901"),
    ({"evaluation.every_steps": -1}, "evaluation.every_steps must be at least 0, got -1"),
    ({"evaluation.sequences": -1}, "evaluation.sequences must be at least 0, got -1"),
    ({"evaluation.sample_tokens": -1}, "sample_tokens must be at least 0, got -1"),
    ({"checkpoint.every_steps": -1}, "checkpoint.every_steps must be at least 0, got -1"),
    ({"checkpoint.keep": 0}, "checkpoint.keep must be at least 1, got 0"),
    ({"train.steps": 0}, "train.steps must be at least 1, got 0"),
    (
        {"train.batch_size": 8, "train.gradient_accumulation": 7},
        "gradient_accumulation=7 must divide train.batch_size=8. Use 4",
    ),
    ({"train.data_parallel_steps": 1001}, "data_parallel_steps must be from 0 to train.steps=1000, got 1001"),
    ({"train.loss_chunk_tokens": -1}, "loss_chunk_tokens must be at least 0, got -1"),
    ({"train.peak_flops_per_s": 0.0}, "peak_flops_per_s must be a positive number, got 0.0"),
    ({"train.peak_flops_per_s": float("inf")}, "peak_flops_per_s must be a positive number, got inf"),
    # optimizers
    ({"inner.learning_rate": 0.0}, "inner.learning_rate must be a positive number, got 0.0"),
    ({"inner.learning_rate": float("nan")}, "inner.learning_rate must be a positive number, got nan"),
    ({"outer.learning_rate": float("inf")}, "outer.learning_rate must be a positive number, got inf"),
    ({"outer.epsilon": 0.0}, "outer.epsilon must be a positive number, got 0.0"),
    ({"inner.clip_norm": 0.0}, "clip_norm must be a positive number, got 0.0"),
    ({"outer.max_norm": 0.0}, "max_norm must be a positive number, got 0.0"),
    ({"inner.final_ratio": 1.1}, "final_ratio must be a number from 0 to 1, got 1.1"),
    ({"outer.learning_rate_final_ratio": -0.1}, "final_ratio must be a number from 0 to 1, got -0.1"),
    ({"outer.momentum": 1.0}, "momentum must be at least 0 and less than 1, got 1.0"),
    ({"outer.betas": (0.9, 1.0)}, "betas must be two numbers from 0 to less than 1, got"),
    ({"outer.momentum_warmup_outer_steps": -1}, "momentum_warmup_outer_steps must be at least 0, got -1"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_impossible_combinations_are_refused_and_say_what_would_work(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        resolve(build(RunSettings, values), num_layers=4)


ALLOWED: list[dict[str, Any]] = [
    {"schedule.inner_steps": 10, "schedule.overlap_steps": 9},
    {"fragments.num_fragments": 5},
    {"fragments.num_fragments": 1, "schedule.overlap_steps": 3},
    {"fragments.num_fragments": 50, "fragments.strategy": "balanced"},
    {"fragments.num_fragments": 2, "schedule.offsets": (0, 99)},
    {"algorithm": "diloco", "fragments.num_fragments": 1, "schedule.overlap_steps": 0, "merge.alpha": 0.0},
    {"algorithm": "diloco", "codec.name": "int8", "codec.error_feedback": True},
    {"codec.name": "topk2", "codec.error_feedback": True},
    {"algorithm": "data-parallel", "codec.name": "bfloat16"},
    {"algorithm": "none", "codec.name": "float32"},
    {"merge.alpha": 0.0},
    {"merge.alpha": 1.0},
    {"train.stop_after": 1000, "inner.warmup_steps": 1000},
    {"train.sequence_length": 1024},
    {"train.device": "cuda:12"},
    {"train.data_parallel_steps": 1000},
    {"inner.schedule": "wsd", "inner.decay_steps": 900},
    {"inner.clip_norm": None},
    {"codec.block_size": 2},
    {"transport.mean_codec": "fp4"},
    {"transport.mean_codec": "bfloat16", "algorithm": "diloco"},
    {"codec.block_size": 65536},
    {"transport.name": "torch"},
    {"transport.name": "torch", "algorithm": "data-parallel"},
    {"transport.name": "torch", "transport.bandwidth_bits_per_s": (1e6,), "transport.latency_s": (0.1,)},
    {"transport.name": "in-process", "algorithm": "none"},
]


@pytest.mark.parametrize("values", ALLOWED, ids=[" ".join(values) for values in ALLOWED])
def test_limits_themselves_are_allowed_and_resolving_twice_changes_nothing(values: dict[str, Any]) -> None:
    once = resolve(build(RunSettings, values), num_layers=4)
    assert resolve(once, num_layers=4) == once
    assert {name: flatten(once)[name] for name in values} == values


@pytest.mark.parametrize("block_size", [0, 1, 2, 3, 7, 8, 65535, 65536, 65538])
def test_block_sizes_are_refused_here_exactly_where_the_codecs_refuse_them(block_size: int) -> None:
    """The rule exists twice, because settings are checked without torch."""

    def refused(make: Callable[[], object]) -> bool:
        try:
            make()
        except ConfigurationError:
            return True
        return False

    by_codec = {refused(functools.partial(make_codec, name, block_size=block_size)) for name in ("int8", "fp4")}
    assert by_codec == {refused(lambda: resolve(build(RunSettings, {"codec.block_size": block_size}), num_layers=4))}
