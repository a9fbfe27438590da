"""The commands ``diloco simulate`` and ``diloco plan``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import main, plan_model
from diloco.config import flatten, load_configuration
from diloco.events import json_ready
from diloco.simulate import METHODS, accuracy
from diloco.train import resolve
from tests.transport.wires import answering_probes


@pytest.fixture(scope="module", autouse=True)
def few_candidates_once() -> Iterator[None]:
    """Make plans choose among a quarter of the settings, and simulate a plan once for its text and its JSON."""
    steps, overlaps = (5, 10, 20, 30, 50, 100, 200, 500, 1000), (0, 2, 3, 5, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            plan_model, "candidates", cache(partial(plan_model.candidates, inner_steps=steps, overlaps=overlaps))
        )
        yield


BY_NUMBERS = "--parameters 1e9 --layers 24 --step-time 0.1s"
LINK = "--bandwidth 500Mbit --latency 80ms"


def output_of(arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    capsys.readouterr()
    assert main(arguments.split()) == code, capsys.readouterr().err
    return capsys.readouterr().out


def read(arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    return json.loads(output_of(f"{arguments} --json", capsys, code))


def test_the_papers_table_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = output_of("simulate --table streaming-diloco", capsys)
    assert "1B streaming-overlap" in words
    assert "16.0 (16.0)" in words
    assert "46 of 50 cells on the published point of the grid, 50 within one step" in words
    cells = read("simulate --table streaming-diloco", capsys)
    assert len(cells) == 50
    assert cells[0] | {"simulated_gbit_per_s": 0, "compute_utilization": 0} == {
        "model": "1B",
        "method": "data-parallel",
        "target": 50,
        "published_gbit_per_s": 86.8,
        "simulated_gbit_per_s": 0,
        "grid_steps": 0,
        "compute_utilization": 0,
    }


@pytest.mark.parametrize("method", [method.name for method in METHODS])
def test_the_bandwidth_for_targets(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read(f"simulate {BY_NUMBERS} --inner-steps 100 --method {method} --targets 50,80,90,95,99", capsys)
    assert [row["target"] for row in rows] == [50, 80, 90, 95, 99]
    assert all(set(row) == {"target", "bandwidth_gbit_per_s", "compute_utilization"} for row in rows)
    rates = [row["bandwidth_gbit_per_s"] for row in rows]
    assert rates == sorted(rates)
    assert all(row["target"] / 100 <= row["compute_utilization"] <= 1 for row in rows)


def test_bandwidths_are_near_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    """The payloads of the table are smaller by a factor of 0.835, and its cells up to one grid step (1.21) too high."""
    rows = read(f"simulate {BY_NUMBERS} --method streaming-overlap", capsys)
    for row, published in zip(rows, (1.4, 4.3, 6.2, 9.1, 11.0), strict=True):
        assert published / 1.25 <= row["bandwidth_gbit_per_s"] <= published * 1.25


def test_a_target_that_no_bandwidth_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"simulate {BY_NUMBERS} --method diloco --latency 500ms --targets 95"
    (row,) = read(arguments, capsys)
    assert row["bandwidth_gbit_per_s"] is None
    assert row["compute_utilization"] == pytest.approx(10 / 11, abs=2e-3)
    assert "none (90." in output_of(arguments, capsys)


def test_what_happens_on_one_link(capsys: pytest.CaptureFixture[str]) -> None:
    """1e9 bfloat16 values at 1 Gbit/s take 16 s after every 10 s of compute."""
    (record,) = [
        row
        for row in read(f"simulate {BY_NUMBERS} --assume trainer --device cuda --bandwidth 1Tbit", capsys)
        if row["method"] == "streaming"
    ]
    assert record["compute_utilization"] > 0.99
    record = read(f"simulate {BY_NUMBERS} --method diloco --bandwidth 1Gbit", capsys)
    assert record["compute_utilization"] == pytest.approx(10 / 26, abs=1e-3)
    assert record["stall_per_round_s"] == pytest.approx(16, abs=0.1)
    assert record["sent_bytes_per_replica"] == 2e9
    assert record["peak_bytes_per_s"] == pytest.approx(1e9 / 8, rel=1e-6)
    assert record["mean_bytes_per_s"] == pytest.approx(2e9 / 26, rel=0.01)


def test_fragments_and_overlap_that_a_small_h_limits_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = [output_of(f"simulate {BY_NUMBERS} {LINK} --inner-steps {steps}", capsys) for steps in (1, 3, 100)]
    limits = ("P = 1, tau = 0", "P = 3, tau = 1", "P = 8, tau = 1")
    assert [limit in each for limit, each in zip(limits, words, strict=True)] == [True] * 3


def test_unequal_replicas_and_jitter(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"simulate --parameters 1e6 --layers 4 --replicas 3 --method diloco {LINK} --step-time"
    equal, slower, shaken = (
        read(f"{arguments} {more}", capsys)["compute_utilization"]
        for more in ("0.1s", "0.1s 0.1s 0.2s", "0.1s --jitter 0.5 --seed 3")
    )
    assert slower < equal * 0.9
    assert shaken < equal


def test_slow_replicas_that_leave_out_steps_keep_nobody_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "simulate --parameters 1e6 --layers 4 --bandwidth 1Tbit --step-time 0.1s 0.2s"
    waiting, dynamic = (
        {record["method"]: record for record in read(f"{arguments} {more}", capsys)} for more in ("", "--dynamic-steps")
    )
    assert waiting["diloco"]["compute_utilization"] == pytest.approx((0.5 + 1) / 2, abs=1e-3)
    assert dynamic["diloco"]["compute_utilization"] == pytest.approx(1, abs=1e-3)
    assert dynamic["diloco"]["wall_s"] == pytest.approx(waiting["diloco"]["wall_s"] / 2, rel=1e-3)
    assert dynamic["diloco"]["trained_share"] == 0.75
    assert dynamic["data-parallel"] == waiting["data-parallel"], "data-parallel training is not affected"
    assert "take every step while the others wait" in output_of(arguments, capsys)
    assert "train 100, 50 of 100 steps (data-parallel: all), 75% of all" in output_of(
        f"{arguments} --dynamic-steps", capsys
    )
    assert "slow replicas" not in output_of(f"{arguments.removesuffix(' 0.2s')} --dynamic-steps", capsys)


def test_grace_says_what_is_gained_and_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "simulate --parameters 1e6 --layers 4 --replicas 3 --bandwidth 1Tbit --step-time 0.1s 0.1s 0.11s"
    waiting, grace = (
        {record["method"]: record for record in read(f"{arguments} {more}", capsys)} for more in ("", "--grace")
    )
    assert grace["diloco"]["wall_s"] == pytest.approx(waiting["diloco"]["wall_s"] / 1.1, rel=0.01)
    assert grace["diloco"]["trained_share"] == pytest.approx((2 + 0.91) / 3, abs=0.002)
    assert waiting["diloco"]["trained_share"] == 1
    assert grace["data-parallel"] == waiting["data-parallel"], "data-parallel training is not affected"
    assert "steps trained" in output_of(f"{arguments} --grace", capsys)
    assert "skip the steps for which the others would wait" in output_of(f"{arguments} --grace", capsys)
    assert "steps trained" not in output_of(arguments, capsys)


def test_with_clipping_every_payload_goes_to_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    """1e6 bfloat16 values, 8 replicas. Without clipping, a reduce-scatter and an all-gather of means send less."""
    arguments = "simulate --parameters 1e6 --layers 4 --replicas 8 --bandwidth 1Gbit --method diloco"
    plain, clipped = (read(f"{arguments} {more}", capsys)["sent_bytes_per_replica"] for more in ("", "--clipping"))
    assert clipped == 7 * 2e6
    assert plain < clipped / 2


def test_with_encoded_means_traffic_does_not_grow_with_the_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    """1.024e6 values in fp4, 64 replicas: 2 x 63/64 payloads and means, each of half a byte per value plus scales."""
    arguments = "simulate --parameters 1.024e6 --layers 4 --codec fp4 --bandwidth 1Gbit --method diloco"
    means = f"{arguments} --mean-codec fp4"
    many, plain = (
        [read(f"{each} --replicas 64", capsys)["sent_bytes_per_replica"] for each in (means, arguments)],
        read(f"{arguments} --mean-codec float32 --replicas 64", capsys)["sent_bytes_per_replica"],
    )
    assert many == [
        pytest.approx(63 / 64 * 1.024e6 * each, rel=0.01) for each in (2 * (0.5 + 1 / 256), 1.5 + 5 / 256)
    ], "the latter by itself, in int8"
    assert many[0] < plain / 4
    assert "encoded as fp4" in output_of(f"{means} --replicas 64", capsys)
    assert "encoded as int8 where contributions take less than 16 bits" in output_of(
        f"{arguments} --replicas 8", capsys
    )
    assert "encoded as" not in output_of(f"{arguments} --replicas 7", capsys)
    gradients = [
        f"{each} --replicas 4".replace("--method diloco", "--method data-parallel") for each in (arguments, means)
    ]
    assert read(gradients[0], capsys) == read(gradients[1], capsys), "gradients have no means to encode"


def test_a_plan_reckons_with_encoded_means_and_writes_them_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    plan = "plan --preset tiny --replicas 16 --bandwidth 20Mbit --step-time 0.1s --target-utilization 80%"
    by_itself, means = (read(f"{plan} {more}", capsys)["choice"] for more in ("", f"--mean-codec fp4 --config {file}"))
    assert means["sent_bytes_per_replica"] != by_itself["sent_bytes_per_replica"]
    assert 'mean_codec = "fp4"' in file.read_text()


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other file types are tested with the functions that draw the pictures."""
    plot, line = tmp_path / "plot.svg", tmp_path / "line.svg"
    output_of(f"simulate {BY_NUMBERS} --plot {plot}", capsys)
    words = output_of(
        f"simulate {BY_NUMBERS} --inner-steps 20 --method streaming-overlap {LINK} --timeline {line}", capsys
    )
    assert plot.stat().st_size > 5000
    assert line.stat().st_size > 5000
    assert f"drawn: {line}" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("simulate", "a model is required"),
        ("simulate --preset 1b --layers 4", "a model is required"),
        ("simulate --table streaming-diloco --preset 1b", "--table streaming-diloco alone"),
        (f"simulate {BY_NUMBERS} --method streming", "there is no method 'streming'"),
        (f"simulate {BY_NUMBERS} --targets 0", "percentages above 0"),
        (f"simulate {BY_NUMBERS} --targets 101", "percentages above 0"),
        (f"simulate {BY_NUMBERS} --bandwidth 500", "such as 500Mbit;"),
        (f"simulate {BY_NUMBERS} --bandwidth 1Gbit 2Gbit 3Gbit", "3 values for 2 replicas"),
        (f"simulate {BY_NUMBERS} --replicas 0", "at least 1"),
        (f"simulate {BY_NUMBERS} --timeline x.svg", "--method streaming-overlap --bandwidth 500Mbit"),
        (f"simulate {BY_NUMBERS} --plot x.pdf", ".svg"),
        (f"simulate {BY_NUMBERS} --plot no/such/folder/x.svg", "folder"),
        (f"simulate {BY_NUMBERS} --codec fp5", "There is no codec 'fp5'"),
        (f"simulate {BY_NUMBERS} --overlap-steps 101", "overlap_steps must be from 0 to 100"),
        (f"simulate {BY_NUMBERS} --overlap-steps 5 --method streaming", "--overlap-steps 5 has no effect on streaming"),
        (f"simulate {BY_NUMBERS} --fragments 25 --method streaming", "Choose 1 to 24"),
        (f"simulate {BY_NUMBERS} --fragments 2 --method diloco", "--fragments 2 has no effect on diloco"),
        (f"simulate {BY_NUMBERS} --seed 1", "--seed 1 has no effect without --jitter"),
        (f"simulate {BY_NUMBERS} --loss 1%", "--loss has no effect on what the paper assumes. Add --assume trainer"),
        (f"simulate {BY_NUMBERS} --device cuda --transport hivemind", "--transport and --device has no effect"),
        ("simulate --parameters 1e9 --layers 24 --step-time 0s", "above 0"),
        (f"plan --preset 1b {LINK}", "the time of an inner step is required"),
        ("plan --preset 1b --step-time 1s", "the bandwidth of the links is required"),
        (f"plan {BY_NUMBERS} {LINK} --config x.toml", "are not enough to train"),
        (f"plan --parameters 1e9 --layers 24 --measure {LINK}", "are not enough to time a step"),
        (f"plan --preset 1b --step-time 1s {LINK} --target-utilization 100%", "below 100 %"),
        (f"plan --preset 1b --step-time 1s {LINK} --config no/such/folder/x.toml", "no folder"),
        (f"plan --preset 1b --step-time 1s {LINK} --steps 0", "at least 1"),
        (f"plan --preset 1b --step-time 1s {LINK} --loss 100%", "a loss of at least 0 and less than 1"),
        (f"plan --preset 1b --step-time 1s {LINK} --price-per-hour -1", "at least 0"),
        (f"plan --preset 1b --step-time 1s {LINK} --price-per-hour nan", "at least 0"),
        (f"plan --preset 1b --step-time 1s {LINK} --device gpu", "--device must be cpu, cuda, cuda:N or auto"),
        (f"plan --preset 1b --step-time 1s {LINK} --peers 10.0.0.2:1", "--peers has an effect only with --measure"),
        (f"plan --preset 1b --measure {LINK} --peers 10.0.0.2:1", "and without --bandwidth"),
        (f"plan --preset 1b --step-time 1s {LINK} --measure", "--measure has nothing to measure"),
        (f"plan --finetune llama {LINK}", "--finetune FOLDER can be combined only with --json"),
    ],
)
def test_misuse_ends_with_2_and_says_what_would_work(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert "Nothing was" in said.err
    assert not said.out


PLAN = f"plan --preset 1b --replicas 4 {LINK} --step-time 0.8s --device cuda"


def test_a_plan_reaches_its_target_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    record = read(f"{PLAN} --target-utilization 95% --price-per-hour 10 --price-per-gb 0.01", capsys)
    choice = record["choice"]
    assert record["reached"]
    assert choice["compute_utilization"] >= choice["sure_utilization"] >= 0.95
    assert choice["hours"] == pytest.approx(44_000 * 0.8 / 3600 / choice["compute_utilization"], rel=1e-3)
    money = 4 * (10 * choice["hours"] + 0.01 * choice["sent_bytes_per_replica"] / 1e9)
    assert choice["cost"] == pytest.approx(money)
    assert "loss" not in json.dumps(record), "losses of different papers and baselines can't be compared"
    assert len({other["why_not"] for other in record["others"]}) >= 3
    words = output_of(f"{PLAN} --target-utilization 95%", capsys)
    assert "\nchosen\n" in words
    assert "\nnot chosen\n" in words
    assert "reaches" in words


SMALL_PLAN = "plan --parameters 25.2M --layers 8 --replicas 3 --bandwidth 300Mbit --latency 40ms --step-time 0.25s"


def test_a_plan_is_made_for_a_congestion_control_a_loss_and_a_wire(capsys: pytest.CaptureFixture[str]) -> None:
    ways = ("--congestion-control bbr", "", "--loss 0.5%")
    reached = [read(f"{SMALL_PLAN} {way} --target-utilization 40%", capsys)["choice"] for way in ways]
    steps = [choice["inner_steps"] / (1 + choice["overlap_steps"]) for choice in reached]
    assert steps[0] <= steps[1] < steps[2], "a slower link needs a larger H"
    words = output_of(f"{SMALL_PLAN} --loss 0.5% --target-utilization 40%", capsys)
    assert "0.5% packet loss, cubic, over torch" in words
    assert "if every round took as long as the slowest tenth" in words
    assert accuracy("torch") in words
    assert read(f"{SMALL_PLAN} --transport hivemind", capsys)["accuracy"] == accuracy("hivemind")


def test_work_that_was_not_measured_is_not_counted_unsaid(capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu, on_gpu = (read(f"{SMALL_PLAN} --device {device}", capsys) for device in ("cpu", "cuda"))
    assert on_cpu["choice"]["inner_steps"] > on_gpu["choice"]["inner_steps"]
    assert on_cpu["left_out"] == []
    assert "not measured" in on_gpu["left_out"][0]


def test_traffic_has_its_price_where_time_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    choice = read(f"{SMALL_PLAN} --price-per-gb 0.5", capsys)["choice"]
    assert choice["cost"] == pytest.approx(3 * 0.5 * choice["sent_bytes_per_replica"] / 1e9)


def test_a_plan_says_which_settings_it_does_not_know_of(capsys: pytest.CaptureFixture[str]) -> None:
    plan = "plan --parameters 1e7 --layers 2 --bandwidth 500Mbit --target-utilization 80%"
    (waiting,) = read(f"{plan} --replicas 2 --step-time 0.9s 1s", capsys)["left_out"]
    assert waiting.startswith("Every replica takes every step, so fast replicas wait for slow ones")
    many = f"{plan} --replicas 16 --step-time 1s"
    (clipping,) = read(many, capsys)["left_out"]
    assert clipping.startswith("Contributions are not clipped.")
    assert read(f"{plan} --replicas 2 --step-time 1s", capsys)["left_out"] == []


def test_a_plan_that_reaches_nothing_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.toml"
    slow = f"plan --preset 1b --bandwidth 1Mbit --step-time 0.8s --config {file}"
    words = output_of(slow, capsys, code=1)
    assert "No settings reach 95.0%." in words
    assert "in each direction" in words
    assert not file.exists()
    record = read(slow, capsys, code=1)
    assert not record["reached"]
    assert record["choice"] is None
    assert record["bandwidth_needed_bits_per_s"] > 1e6


@pytest.mark.parametrize(
    ("plan", "algorithm"),
    [
        ("--preset tiny --bandwidth 15Mbit --latency 80ms --steps 500", "streaming"),
        ("--preset tiny-muon --bandwidth 2Mbit --latency 80ms --steps 500 --mean-codec int8", "streaming"),
        ("--preset tiny --bandwidth 100Mbit --latency 5s --steps 5000 --target-utilization 80%", "diloco"),
        ("--preset 1b --bandwidth 10Gbit --latency 80ms --device cuda", "streaming"),
        ("--preset tiny --bandwidth 100Gbit", "data-parallel"),
    ],
)
def test_the_file_of_a_plan_is_what_was_shown_and_keeps_the_rest_of_the_preset(
    plan: str, algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.toml"
    command = f"plan {plan} --step-time 0.2s --config {file}"
    record = read(command, capsys)
    words = output_of(command, capsys)
    shown = [line.strip() for line in words.split("\nsettings\n")[1].split("\nnot chosen\n")[0].splitlines()]
    for line in file.read_text().splitlines():
        assert line in shown or line.startswith("#")
    preset = plan.split()[1]
    chosen, configuration = record["choice"], load_configuration([str(file)])
    settings = resolve(configuration, num_layers=configuration.model.layers)
    assert settings.algorithm == chosen["algorithm"] == algorithm
    assert settings.train.steps == chosen["steps"]
    assert settings.sync.codec == chosen["codec"]
    if algorithm != "data-parallel":
        assert settings.sync.inner_steps == chosen["inner_steps"] <= settings.train.steps
        assert settings.sync.overlap_steps == chosen["overlap_steps"]
        assert settings.sync.num_fragments == chosen["num_fragments"]
    usual = load_configuration(["--preset", preset, "--steps", str(chosen["steps"])])
    before, after = (flatten(resolve(each, num_layers=each.model.layers)) for each in (usual, configuration))
    assert record["changed"] == {
        name: json_ready([before[name], after[name]]) for name in before if before[name] != after[name]
    }
    assert not [name for name in record["changed"] if name.startswith(("outer.", "sync.error_feedback"))]
    for name in record["changed"]:
        assert f"  {name} " in words


def test_a_file_that_cannot_be_written_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").mkdir()
    arguments = f"plan --preset tiny --bandwidth 100Gbit --step-time 0.2s --config {tmp_path / 'taken'}"
    assert main(arguments.split()) == 1
    assert "can't be written" in capsys.readouterr().err


@pytest.fixture
def peer() -> Iterator[str]:
    with answering_probes() as address:
        yield str(address)


def test_measuring_the_step_and_the_link(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"plan --preset tiny --measure --peers {peer} --replicas 2 --target-utilization 50%"
    record = read(arguments, capsys)
    step, link = record["measured"]["step"], record["measured"]["links"][peer]
    assert 0 < step["median_s"] < 60
    assert step["steps"] >= 1
    assert 0 < step["send_s_per_value"] < 1e-3
    assert link["bandwidth_bits_per_s"] > 1e6
    assert 0 <= link["latency_s"] < 1
    words = output_of(f"{arguments} --step-time 0.2s", capsys)
    assert f"to {peer}" in words


def test_a_peer_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "tiny", "--measure", "--step-time", "1s", "--peers", "127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
