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
    ({"sync.inner_steps": 0}, "inner_steps must be at least 1, got 0"),
    ({"sync.inner_steps": 10, "sync.overlap_steps": 11}, "overlap_steps must be from 0 to 10 .* got 11"),
    (
        {"sync.inner_steps": 9, "sync.overlap_steps": 9, "sync.merge_alpha": 0.5},
        "overlap_steps=9, a whole round late",
    ),
    ({"sync.overlap_steps": -1}, "overlap_steps must be from 0 to 100 .* got -1"),
    ({"sync.inner_steps": 2, "sync.num_fragments": 3}, "num_fragments must be from 1 to 2 .* got 3"),
    ({"sync.num_fragments": 0}, "num_fragments must be at least 1, got 0"),
    ({"sync.num_fragments": 6}, "num_fragments=6 is too many for a model of 4 layers.*1 to 5.*balanced"),
    (
        {"sync.num_fragments": 6, "sync.fragment_strategy": "sequential"},
        "num_fragments=6 is too many for a model of 4 layers.*1 to 5",
    ),
    ({"sync.num_fragments": 2, "schedule.offsets": (0,)}, "offsets must be 2 values from 0 to 99"),
    ({"sync.num_fragments": 1, "schedule.offsets": (100,)}, "offsets must be .* from 0 to 99"),
    ({"sync.num_fragments": 1, "schedule.offsets": (-1,)}, "offsets must be .* from 0 to 99"),
    (
        {"sync.fragment_strategy": "patterns", "fragments.patterns": (("*",),), "sync.num_fragments": 2},
        "num_fragments must match the 1 lists.*got 2. Use 1, or leave it out",
    ),
    # settings that only Streaming DiLoCo supports
    ({"algorithm": "diloco", "sync.num_fragments": 2}, "2 fragments.*Use --algorithm streaming"),
    ({"algorithm": "diloco", "sync.overlap_steps": 1}, "overlap_steps=1.*Use --algorithm streaming"),
    ({"algorithm": "diloco", "sync.merge_alpha": 0.5}, "alpha=0.5.*Use --algorithm streaming"),
    ({"algorithm": "diloco", "sync.merge": "rebase"}, "rebase.*Use --algorithm streaming"),
    (
        {"algorithm": "diloco", "sync.fragment_strategy": "patterns", "fragments.patterns": (("a",), ("*",))},
        "2 fragments.*Use --algorithm streaming",
    ),
    # settings that would be ignored without an outer loop
    ({"algorithm": "data-parallel", "sync.codec": "fp4"}, "sync.codec='fp4'.*--codec float32"),
    ({"algorithm": "data-parallel", "sync.codec": "int8"}, "sync.codec='int8'.*float32, float16, bfloat16"),
    ({"algorithm": "none", "sync.codec": "float16"}, "float16.* independent replicas send nothing"),
    ({"algorithm": "data-parallel", "sync.overlap_steps": 2}, "overlap_steps=2.*--algorithm streaming"),
    ({"algorithm": "none", "sync.merge_alpha": 0.5}, "alpha=0.5.*--algorithm streaming"),
    # codec
    ({"sync.codec": "int9"}, "sync.codec='int9'.*did you mean 'int8'"),
    ({"sync.codec": "zip"}, "sync.codec='zip'.*bfloat16, float16, float32, fp4, int8, topk2"),
    ({"sync.codec": "topk2"}, "drops 98 % .* Add --error-feedback 1"),
    ({"sync.arguments.codec.block_size": 0}, "block_size must be an even number from 2 to 65536, got 0"),
    ({"sync.arguments.codec.block_size": 7}, "block_size must be an even number from 2 to 65536, got 7"),
    ({"sync.arguments.codec.block_size": 65538}, "block_size must be an even number from 2 to 65536, got 65538"),
    ({"sync.codec": "float32", "sync.error_feedback": True}, "error_feedback.* no loss to feed back"),
    (
        {"sync.arguments.average.codec": "fp4", "algorithm": "data-parallel"},
        "mean_codec='fp4'.*only the means of streaming",
    ),
    ({"sync.arguments.average.codec": "int8", "algorithm": "none"}, "mean_codec='int8'.*only the means of streaming"),
    (
        {"algorithm": "data-parallel", "sync.codec": "float16", "sync.error_feedback": True},
        "error_feedback.* no loss to feed back",
    ),
    # clipping and averaging
    (
        {"sync.arguments.average.max_norm": 1.0, "algorithm": "data-parallel"},
        "only streaming and diloco send contributions",
    ),
    (
        {"sync.arguments.average.max_norm": 1.0, "network.transport": "torch", "network.replica_size": 2},
        "Use --train.parallelism ddp",
    ),
    ({"sync.average": "senders", "algorithm": "data-parallel"}, "only streaming and diloco send contributions"),
    ({"sync.average": "rds"}, "sync.average='rds' is unknown; .*senders"),
    ({"sync.arguments.average": {"a": 1}}, "sync.arguments.average can't be used with sync.average='mean'"),
    # merge
    ({"sync.merge_alpha": 1.5}, "alpha must be a number from 0 to 1, got 1.5"),
    ({"sync.merge_alpha": -0.1}, "alpha must be a number from 0 to 1, got -0.1"),
    ({"sync.merge_alpha": float("nan")}, "alpha must be a number from 0 to 1, got nan"),
    ({"sync.merge_alpha": 0.0, "sync.merge": "rebase"}, "rebase.* one of the two"),
    # transports and paths
    ({"network.transport": "hivemind"}, "'hivemind' needs the name of the run. Use --run NAME"),
    (
        {"network.run": "mine"},
        "network.run='mine' can't be used with network.transport='in-process'. Use --transport hivemind",
    ),
    (
        {"network.transport": "hivemind", "network.run": "mine", "algorithm": "data-parallel"},
        "replicas that join and leave can't average gradients at every step",
    ),
    (
        {"network.transport": "hivemind", "network.run": "mine", "network.min_replicas": 2},
        "start_replicas must be at least network.min_replicas=2, got 1. Use --replicas 2",
    ),
    (
        {"network.transport": "hivemind", "network.run": "m", "network.straggler": "skip", "swarm.join_window_s": 3.9},
        "join_window_s must be at least 4 s with transport.heartbeat_s=2, got 3.9",
    ),
    (
        {"network.transport": "hivemind", "network.run": "m", "network.straggler": "grace", "swarm.join_window_s": 3.9},
        "join_window_s must be at least 4 s with transport.heartbeat_s=2, got 3.9",
    ),
    ({"network.straggler": "grace"}, "straggler='grace' can't be used with .*Use --transport hivemind"),
    ({"swarm.dynamic_steps": True}, "dynamic_steps=true can't be used with .*Use --transport hivemind"),
    (
        {"swarm.dynamic_steps": True, "network.transport": "torch"},
        "dynamic_steps=true can't be used with .*Use --transport hivemind",
    ),
    (
        {"network.transport": "hivemind", "network.run": "mine", "data.streaming": True},
        "data.streaming=true can't be used with network.transport='hivemind'",
    ),
    (
        {
            "network.transport": "torch",
            "transport.restarts": 1,
            "network.on_loss": "continue",
            "data.streaming": True,
        },
        "transport.restarts=1 can't be used with data.streaming",
    ),
    (
        {"network.transport": "hivemind", "network.run": "mine", "emulate.latency": (0.1,)},
        r"latency_s=.* Use \(\)",
    ),
    ({"network.transport": "hivemind", "network.run": "mine", "transport.host": "::1"}, "host='::1' .* Use None"),
    (
        {"network.transport": "hivemind", "network.run": "mine", "data.sharding": "contiguous"},
        "sharding=.* Use 'shuffled'",
    ),
    (
        {"network.transport": "torch", "transport.faults": ("drop replica=0 fragment=0 outer_step=0",)},
        "faults can't be used with network.transport='torch'.*--transport in-process, or leave it out",
    ),
    (
        {"network.transport": "torch", "emulate.step_time": (0.1,)},
        "step_time_s can't be used with network.transport='torch'.*--transport in-process, or leave it out",
    ),
    (
        {"network.transport": "torch", "algorithm": "none"},
        "algorithm='none' sends nothing and .* network.transport='torch'. Use --transport in-process",
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
    ({"optimizer.warmup_steps": 1001}, "warmup_steps must be from 0 to train.steps=1000, got 1001"),
    ({"optimizer.warmup_steps": -1}, "warmup_steps must be from 0 to train.steps=1000, got -1"),
    ({"optimizer.schedule": "wsd", "inner.decay_steps": 901}, "decay_steps must be from 0 to 900.*got 901"),
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
    ({"optimizer.learning_rate": 0.0}, "optimizer.learning_rate must be a positive number, got 0.0"),
    ({"optimizer.learning_rate": float("nan")}, "optimizer.learning_rate must be a positive number, got nan"),
    ({"sync.outer_learning_rate": float("inf")}, "sync.outer_learning_rate must be a positive number, got inf"),
    ({"sync.arguments.outer.epsilon": 0.0}, "sync.arguments.outer.epsilon must be a positive number, got 0.0"),
    ({"optimizer.clip_norm": 0.0}, "clip_norm must be a positive number, got 0.0"),
    ({"sync.arguments.average.max_norm": 0.0}, "max_norm must be a positive number, got 0.0"),
    ({"optimizer.final_ratio": 1.1}, "final_ratio must be a number from 0 to 1, got 1.1"),
    ({"sync.arguments.outer.final_ratio": -0.1}, "final_ratio must be a number from 0 to 1, got -0.1"),
    ({"sync.outer_momentum": 1.0}, "momentum must be at least 0 and less than 1, got 1.0"),
    ({"sync.arguments.outer.betas": (0.9, 1.0)}, "betas must be two numbers from 0 to less than 1, got"),
    ({"sync.arguments.outer.momentum_warmup": -1}, "momentum_warmup_outer_steps must be at least 0, got -1"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_impossible_combinations_are_refused_and_say_what_would_work(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        resolve(build(RunSettings, values), num_layers=4)


ALLOWED: list[dict[str, Any]] = [
    {"sync.inner_steps": 10, "sync.overlap_steps": 9},
    {"sync.num_fragments": 5},
    {"sync.num_fragments": 1, "sync.overlap_steps": 3},
    {"sync.num_fragments": 50, "sync.fragment_strategy": "balanced"},
    {"sync.num_fragments": 2, "schedule.offsets": (0, 99)},
    {"algorithm": "diloco", "sync.num_fragments": 1, "sync.overlap_steps": 0, "sync.merge_alpha": 0.0},
    {"algorithm": "diloco", "sync.codec": "int8", "sync.error_feedback": True},
    {"sync.codec": "topk2", "sync.error_feedback": True},
    {"algorithm": "data-parallel", "sync.codec": "bfloat16"},
    {"algorithm": "none", "sync.codec": "float32"},
    {"sync.merge_alpha": 0.0},
    {"sync.merge_alpha": 1.0},
    {"train.stop_after": 1000, "optimizer.warmup_steps": 1000},
    {"train.sequence_length": 1024},
    {"train.device": "cuda:12"},
    {"train.data_parallel_steps": 1000},
    {"optimizer.schedule": "wsd", "inner.decay_steps": 900},
    {"optimizer.clip_norm": None},
    {"sync.arguments.codec.block_size": 2},
    {"sync.arguments.average.codec": "fp4"},
    {"sync.arguments.average.codec": "bfloat16", "algorithm": "diloco"},
    {"sync.arguments.codec.block_size": 65536},
    {"network.transport": "torch"},
    {"network.transport": "torch", "algorithm": "data-parallel"},
    {"network.transport": "torch", "emulate.bandwidth": (1e6,), "emulate.latency": (0.1,)},
    {"network.transport": "in-process", "algorithm": "none"},
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
    assert by_codec == {
        refused(lambda: resolve(build(RunSettings, {"sync.arguments.codec.block_size": block_size}), num_layers=4))
    }
