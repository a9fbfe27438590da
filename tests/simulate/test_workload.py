"""Workloads: they have the same fragments and sizes as the real model."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.algorithm import SyncSchedule, make_codec, partition
from diloco.errors import ConfigurationError
from diloco.model import ModelSettings, build_model, get_preset, preset_names
from diloco.simulate import METHODS, Workload, gradient_ready, layer_releases, method_named


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_their_count_and_their_layers(name: str) -> None:
    preset = get_preset(name)
    workload = Workload.of_model(preset.model, preset.vocab_size, 1.0)
    assert (workload.parameters, workload.layers) == (preset.parameters, preset.model.layers)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.sampled_from(["swiglu", "gelu"]), st.booleans(), st.data())
def test_fragments_are_those_of_the_model(layers: int, ffn: str, tied: bool, data: st.DataObject) -> None:
    model = ModelSettings(layers=layers, width=8, ffn_width=12, heads=2, vocab_size=11, tie_embeddings=tied)
    model = dataclasses.replace(model, ffn=ffn)
    number = data.draw(st.integers(1, layers + 1))
    real = partition(build_model(model, seed=0, device="meta"), num_fragments=number)
    assert Workload.of_model(model, 11, 1.0).fragment_sizes(number) == tuple(fragment.numel for fragment in real)


@given(st.integers(1, 10**6), st.integers(1, 60), st.data())
def test_sizes_add_up_where_layers_do_not_divide_the_parameters(more: int, layers: int, data: st.DataObject) -> None:
    outside = data.draw(st.integers(0, more))
    workload = Workload(parameters=layers + more, layers=layers, outside=outside, step_time_s=1.0)
    number = data.draw(st.integers(1, layers + bool(outside)).filter(lambda p: p == 1 or p > bool(outside)))
    sizes = workload.fragment_sizes(number)
    assert sum(sizes) == workload.parameters
    assert len(sizes) == number


@pytest.mark.parametrize("number", [0, 6, -1])
def test_more_fragments_than_layers_are_refused(number: int) -> None:
    with pytest.raises(ConfigurationError, match="Choose 1 to 5"):
        Workload(parameters=100, layers=4, outside=20, step_time_s=1.0).fragment_sizes(number)


@pytest.mark.parametrize(
    "given_values",
    [{"layers": 0}, {"parameters": 3}, {"outside": -1}, {"outside": 97}, {"step_time_s": 0.0}, {"step_time_s": -1.0}],
)
def test_workloads_that_are_none_are_refused(given_values: dict[str, float]) -> None:
    values = {"parameters": 100, "layers": 4, "outside": 0, "step_time_s": 1.0} | given_values
    with pytest.raises(ConfigurationError, match="at least one layer"):
        Workload(**values)  # type: ignore[arg-type]


def test_methods_are_the_papers_rows_and_their_own_schedules() -> None:
    workload = Workload(parameters=24_000, layers=24, step_time_s=0.1)
    schedules = {method.name: method.schedule(workload, 100) for method in METHODS if not method.data_parallel}
    assert schedules["diloco"] == SyncSchedule(inner_steps=100)
    assert schedules["streaming"] == SyncSchedule(inner_steps=100, num_fragments=8)
    assert schedules["streaming-overlap-fp4"] == SyncSchedule(inner_steps=100, num_fragments=8, overlap_steps=1)
    other = method_named("streaming-overlap").schedule(workload, 50, num_fragments=4, overlap_steps=5)
    assert other == SyncSchedule(inner_steps=50, num_fragments=4, overlap_steps=5)
    with pytest.raises(ConfigurationError, match="no method 'streming'"):
        method_named("streming")


@given(st.integers(1, 40))
def test_the_last_layer_is_ready_first_and_the_first_at_the_end_of_the_step(layers: int) -> None:
    ready = gradient_ready(layers)
    assert ready[0] == 1
    assert all(earlier > later for earlier, later in pairwise(ready))
    assert min(ready) > 1 / 3, "no gradient is ready before the forward pass has ended"


def test_only_layers_that_take_part_are_released() -> None:
    ready = gradient_ready(3)
    assert layer_releases(3, (0, 2)) == ((ready[2], 0.5), (ready[0], 0.5))


def test_payloads_are_the_codecs_own_scales_included() -> None:
    workload, codec = Workload(parameters=9000, layers=3, step_time_s=0.1), make_codec("fp4", block_size=64)
    traffic = workload.traffic(SyncSchedule(inner_steps=10, num_fragments=3), [codec], 2, release="layer")
    assert [parcel.sent_bytes[0] for parcel in traffic.parcels] == [codec.payload_bytes(3000)] * 3
    assert workload.gradients(codec, 4).parcels[0].sent_bytes[0] == 1.5 * codec.payload_bytes(9000)
    assert sum(share for _, share in traffic.parcels[0].releases) == pytest.approx(1)
