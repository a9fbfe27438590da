"""Components are constructed from settings, and each setting reaches the right place."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import pytest
import torch

from diloco.algorithm import (
    Adam,
    AlphaMerge,
    CodecSettings,
    FragmentSettings,
    MergeSettings,
    Nesterov,
    OuterSettings,
    RebaseMerge,
    RoundId,
    ScheduleSettings,
    Sgd,
    at,
)
from diloco.devices import choose_device, use_device
from diloco.errors import ConfigurationError
from diloco.model import ModelSettings, build_model
from diloco.train import (
    RunSettings,
    make_configured_codec,
    make_fragments,
    make_merge_rule,
    make_outer_optimizer,
    make_schedule,
    make_transport,
)
from diloco.transport import TransportSettings


class TestDevice:
    def test_auto_takes_what_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for available, expected in ((False, "cpu"), (True, "cuda")):
            monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
            assert choose_device("auto") == torch.device(expected)

    def test_a_gpu_of_apple_comes_after_cuda_and_before_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigurationError, match="'mps' is not available"):
            choose_device("mps")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        assert choose_device("auto") == choose_device("mps") == torch.device("mps")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert choose_device("auto") == torch.device("cuda")

    @pytest.mark.parametrize(("device", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:8", 8)])
    def test_one_that_is_absent_is_refused(self, device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A device that is requested but not available is an error; the CPU is never used instead."""
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        with pytest.raises(ConfigurationError, match=f"'{device}' is not available: torch sees {count} CUDA devices"):
            choose_device(device)

    @pytest.mark.parametrize(("device", "count"), [("cpu", 0), ("cuda", 1), ("cuda:7", 8)])
    def test_one_that_is_there_is_taken(self, device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        assert choose_device(device) == torch.device(device)

    @pytest.mark.parametrize(("device", "current"), [("cpu", []), ("cuda", []), ("cuda:0", [0]), ("cuda:7", [7])])
    def test_the_gpu_in_use_is_torchs_current_one(
        self, device: str, current: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made_current: list[int] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: made_current.append(device.index))
        assert use_device(device) == torch.device(device)
        assert made_current == current


class TestOuterOptimizer:
    @pytest.mark.parametrize("kind", ["linear", "cosine"])
    @pytest.mark.parametrize("name", ["sgd", "nesterov", "adam"])
    def test_the_learning_rate_falls_over_the_outer_steps_of_the_run(
        self, name: Literal["sgd", "nesterov", "adam"], kind: Literal["linear", "cosine"]
    ) -> None:
        """Over ten rounds of a fragment, the rate starts at the peak and is half-way to its end value at five."""
        settings = OuterSettings(
            name=name,
            learning_rate=0.8,
            learning_rate_schedule=kind,
            learning_rate_final_ratio=0.25,
        )
        outer = make_outer_optimizer(settings, 10)
        assert isinstance(outer, Sgd | Nesterov | Adam)
        rates = [at(outer.learning_rate, step) for step in range(13)]
        assert rates[0] == 0.8
        assert rates[5] == pytest.approx(0.5)
        assert rates[10:] == pytest.approx([0.2] * 3)
        assert all(later <= earlier for earlier, later in itertools.pairwise(rates))

    def test_constant_is_a_number(self) -> None:
        outer = make_outer_optimizer(OuterSettings(learning_rate=0.4, momentum=0.8), 10)
        assert outer == Nesterov(learning_rate=0.4, momentum=0.8)

    def test_a_learning_rate_of_zero_is_not_the_default(self) -> None:
        assert make_outer_optimizer(OuterSettings(name="sgd", learning_rate=0.0), 1) == Sgd(learning_rate=0.0)

    @pytest.mark.parametrize("outer_steps", [0, 1])
    def test_a_run_without_rounds_still_has_a_schedule(self, outer_steps: int) -> None:
        outer = make_outer_optimizer(OuterSettings(learning_rate=0.4, learning_rate_schedule="cosine"), outer_steps)
        assert isinstance(outer, Nesterov)
        assert [at(outer.learning_rate, step) for step in range(2)] == [0.4, 0.0]

    def test_the_momentum_rises_over_its_first_outer_steps_and_stays(self) -> None:
        outer = make_outer_optimizer(OuterSettings(momentum=0.9, momentum_warmup_outer_steps=3, learning_rate=0.4), 10)
        assert isinstance(outer, Nesterov)
        assert [at(outer.momentum, step) for step in range(5)] == pytest.approx([0.3, 0.6, 0.9, 0.9, 0.9])

    def test_a_schedule_is_laid_out_in_steps_of_the_optimizer(self) -> None:
        """Two rounds, linear to zero: the factors are 1 and a half for the first two means and 0 for the third."""
        outer = make_outer_optimizer(
            OuterSettings(name="sgd", learning_rate=1.0, learning_rate_schedule="linear"), outer_steps=2
        )
        values = torch.zeros(1)
        state = outer.init(values)
        seen = []
        for _ in range(3):
            outer.update(torch.ones(1), state, values)
            seen.append(values.item())
        assert seen == [-1.0, -1.5, -1.5]

    def test_adam_gets_its_own(self) -> None:
        settings = OuterSettings(name="adam", learning_rate=0.1, betas=(0.5, 0.6), epsilon=0.3)
        assert make_outer_optimizer(settings, 10) == Adam(learning_rate=0.1, betas=(0.5, 0.6), epsilon=0.3)


class TestTransport:
    def test_without_step_times_there_is_no_network(self) -> None:
        transport = make_transport(TransportSettings(replicas=3, min_contributors=2, round_timeout_s=7.0))
        rounds = transport.rounds
        assert rounds.network is None
        assert (len(rounds.view.members), rounds.min_contributors, rounds.timeout_s) == (3, 2, 7.0)

    def test_one_value_is_for_all_replicas(self) -> None:
        settings = TransportSettings(replicas=3, bandwidth_bits_per_s=(8e6,), latency_s=(0.05,), step_time_s=(0.5,))
        network = make_transport(settings).rounds.network
        assert network is not None
        assert {(link.bandwidth_bits_per_s, link.latency_s) for link in network.links} == {(8e6, 0.05)}
        assert (len(network.links), network.step_time_s) == (3, (0.5, 0.5, 0.5))

    def test_several_are_one_for_each_in_order(self) -> None:
        settings = TransportSettings(
            replicas=2, bandwidth_bits_per_s=(1e6, 2e6), latency_s=(0.1, 0.2), step_time_s=(0.5, 0.25)
        )
        network = make_transport(settings).rounds.network
        assert network is not None
        assert [(link.bandwidth_bits_per_s, link.latency_s) for link in network.links] == [(1e6, 0.1), (2e6, 0.2)]
        assert network.step_time_s == (0.5, 0.25)

    def test_what_is_not_given_is_unlimited_and_at_once(self) -> None:
        network = make_transport(TransportSettings(replicas=2, step_time_s=(1.0,))).rounds.network
        assert network is not None
        assert {(link.bandwidth_bits_per_s, link.latency_s) for link in network.links} == {(math.inf, 0.0)}

    def test_faults_are_read(self) -> None:
        transport = make_transport(TransportSettings(faults=("drop replica=1 fragment=0 outer_step=3",)))
        assert [(f.kind, f.replica, f.round) for f in transport.rounds.faults] == [("drop", 1, RoundId(0, 3))]


def test_schedule_fragments_merge_and_codec_follow_their_settings() -> None:
    settings = RunSettings(
        schedule=ScheduleSettings(inner_steps=10, overlap_steps=3, offsets=(0, 7)),
        fragments=FragmentSettings(num_fragments=2, strategy="balanced"),
        codec=CodecSettings(name="int8", block_size=64),
    )
    schedule = make_schedule(settings)
    assert (schedule.inner_steps, schedule.overlap_steps, schedule.fragment_offsets) == (10, 3, (0, 7))
    model = build_model(ModelSettings(layers=1, width=16, ffn_width=32, heads=2, vocab_size=17), seed=0)
    fragments = make_fragments(settings.fragments, model)
    assert len(fragments) == schedule.num_fragments == 2
    assert abs(fragments[0].numel - fragments[1].numel) <= max(p.numel() for p in model.parameters())
    patterns = FragmentSettings(strategy="patterns", patterns=(("layers.*",), ("embedding.*", "head.*", "norm.*")))
    assert [len(f.names) for f in make_fragments(patterns, model)] == [9, 3]
    codec = make_configured_codec(settings.codec)
    assert (codec.name, codec.parameters()) == ("int8", {"block_size": 64})
    assert make_configured_codec(CodecSettings(name="float16", block_size=64)).name == "float16"
    assert make_merge_rule(MergeSettings(rule="rebase")) == RebaseMerge()
    assert make_merge_rule(MergeSettings(rule="alpha", alpha=0.5)) == AlphaMerge(0.5)
    assert make_merge_rule(MergeSettings(rule="alpha")) == AlphaMerge(0.0)
