"""The command ``diloco plan``."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.algorithm import Sgd, SyncSchedule
from diloco.cli import main
from diloco.model import ModelSettings, build_language_model
from diloco.outer import DiLoCo
from tests.finetuning import write_base
from tests.runs import SMALL, train, write_text

LINK = "--bandwidth 500Mbit --latency 80ms --step-time 0.8s"
SIZE = "--parameters 7B --fragments 4"


def output_of(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["plan", *shlex.split(arguments)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def read(arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(output_of(f"{arguments} --json", capsys), parse_constant=pytest.fail)  # NaN is no JSON


def test_the_report_has_the_costs_the_fragments_and_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = output_of(f"--preset 1b --replicas 4 {LINK} --device cpu", capsys)
    decision, facts, fragments, bandwidths, others, note = words.split("\n\n")
    assert decision.startswith("Take --overlap-steps 6: 95% of the time goes into training, and each replica sends ")
    named = dict(line.split("  ", 1) for line in facts.splitlines())
    assert named["settings"].strip() == "1b: streaming, H = 125, P = 9, tau = 1, fp4"
    assert "at p90 round time" in named["of rounds"]
    assert [row.split("  ")[0] for row in bandwidths.splitlines()] == [
        "utilisation over bandwidth",
        "H = 125, P = 9, tau = 1, fp4",
        "H = 125, P = 9, tau = 6, fp4",
        "data-parallel, float32",
    ]
    assert [row.split("  ")[0] for row in fragments.splitlines()] == ["fragment", "0", "1 to 6", "7 to 8"]
    assert "H = 125, fp4 (as above)" in others
    assert others.splitlines()[-1].startswith("data-parallel, float32")
    assert "H = 125, sign" in others
    assert "sign needs --error-feedback 1. The loss is not predicted." in note


def test_the_costs_of_a_run_and_of_its_shared_start(capsys: pytest.CaptureFixture[str]) -> None:
    prices = "--price-per-hour 10 --price-per-gb 0.5"
    plan = read(f"--preset 1b --replicas 4 {LINK} --steps 1000 --data-parallel-steps 10 {prices}", capsys)
    own, start = plan["prediction"], plan["data_parallel"]
    assert plan["hours"] == pytest.approx((990 * own["step_s"] + 10 * start["step_s"]) / 3600)
    sent = 990 * own["mean_sent_bytes_per_step"] + 10 * start["mean_sent_bytes_per_step"]
    run = plan["run"]
    assert run["sent_bytes"] == pytest.approx(sent)
    assert run["start_s"] == pytest.approx(10 * start["step_s"])
    computed_s = 990 * own["step_s"] * own["compute_utilization"] + run["start_s"] * start["compute_utilization"]
    assert run["compute_utilization"] == pytest.approx(computed_s / run["wall_s"])
    assert plan["cost"] == pytest.approx(4 * (10 * plan["hours"] + 0.5 * sent / 1e9))
    assert main(["plan", *f"--preset 1b --replicas 4 {LINK} --steps 1000 {prices}".split()]) == 0
    assert re.search(r"cost +[\d,]+\.\d\d, [\d,]+\.\d\d of it for sending", capsys.readouterr().out)
    assert all(row["inner_steps"] <= 990 for row in plan["table"])


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("--bandwidth 1Gbit --data-parallel-steps 0", "Your link is good enough for these settings: 100% of the time"),
        ("--bandwidth 20Mbit", "Your link is good enough for these settings: 100% of the time"),
        ("--bandwidth 20Mbit --transport torch", "Take --data-parallel-steps 0: 100% of the time goes into training"),
        ("--bandwidth 20Mbit --data-parallel-steps 200", "Take --data-parallel-steps 0: 100% of the time goes into"),
        ("--bandwidth 20Mbit --data-parallel-steps 200", "the shared start of 200 steps alone takes "),
        ("--bandwidth 100kbit --data-parallel-steps 0", "This link is too slow for this model: at best "),
        ("--bandwidth 100kbit --data-parallel-steps 0", "These settings need about "),
        ("--bandwidth 30Mbit --algorithm data-parallel", "Take --algorithm diloco --inner-steps "),
        ("--bandwidth 20Mbit", "and each replica sends 26.3 MB in 2m"),
        ("--bandwidth 20Mbit --steps 1000000", "B a day."),
    ],
)
def test_the_first_line_says_what_to_do(link: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = f"--preset tiny --replicas 2 --round-trip 40ms --step-time 250ms --device cpu {link}"
    assert words in output_of(plan, capsys).splitlines()[0]


def test_a_model_by_its_size_and_gpus_has_the_settings_of_the_nearest_preset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = read("--parameters 1B --gpus '8 H100' --mfu 0.5 --bandwidth 1Gbit --round-trip 60ms", capsys)
    assert plan["preset"] == "1b"
    assert plan["site"]["step_time_s"] == [pytest.approx(6e9 * 2048 * 1024 / (0.5 * 8 * 989e12))] * 4
    assert plan["site"]["links"] == [{"bandwidth_bits_per_s": 1e9, "latency_s": 0.03}] * 4
    assert not plan["work_is_known"], "of GPUs"
    one = read("--parameters 1B --gpus 'RTX 4090' --bandwidth 1Gbit", capsys)["site"]["step_time_s"]
    assert read("--parameters 1B --gpus '2 RTX 4090' --bandwidth 1Gbit", capsys)["site"]["step_time_s"][0] == one[0] / 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--gpus '8 Z100'", "--gpus '8 Z100' is not a number and a name of B200, "),
        ("--gpus '0 H100'", "is not a number and a name of"),
        ("--gpus 'many H100'", "is not a number and a name of"),
        ("--gpus H100 --step-time 1s", "both say how long an inner step takes"),
        ("--step-time 1s --latency 3ms --round-trip 6ms", "the latency is half of the round trip"),
        ("", "one for all 2 replicas or one for each, such as 250ms, or --gpus '8 H100'"),
    ],
)
def test_what_contradicts_itself_is_refused(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *shlex.split(f"--parameters 1B --replicas 2 --bandwidth 1Gbit {arguments}")]) == 2
    assert words in capsys.readouterr().err


def test_the_utilisation_over_bandwidth_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--preset tiny --replicas 2 {LINK} --plot {tmp_path / 'plan.svg'}"
    shares = read(arguments, capsys)["curves"]["compute_utilization"]
    assert all(row == sorted(row) for row in shares.values()), "more bandwidth never costs time"
    assert "Mbit/s" in (tmp_path / "plan.svg").read_text()
    for name in ("plan.xyz", "plan", ""):  # the last one is the folder, beside which a plan.png was written
        assert main(["plan", *arguments.split(), "--plot", str(tmp_path / name)]) == 2
        assert "Name a file such as plan.svg" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["plan.svg"]


def test_flags_and_file_are_those_of_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'preset = "streaming-35m"\nalgorithm = "diloco"\n[sync]\ncodec = "int8"\n[data]\npaths = ["not-here.jsonl"]\n'
    )
    plan = read(f"{file} --inner-steps 60 --replicas 2 --out runs/x {LINK}", capsys)
    own = plan["prediction"]
    assert (own["inner_steps"], own["codec"], own["num_fragments"], own["overlap_steps"]) == (60, "int8", 1, 0)
    assert own["fragments"][0]["values"] == plan["model"]["trained"] == 35_265_792
    printed = tomllib.loads(output_of(f"{file} --inner-steps 60 --transport swarm --print-config", capsys))
    assert (printed["sync"]["inner_steps"], printed["network"]["transport"]) == (60, "swarm")


def test_emulated_links_of_the_settings_are_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The utilisation "on emulated links" is that of the run, except for its first H steps and its end."""
    emulated = "--emulate.bandwidth 150kbit --emulate.latency 50ms --emulate.step-time 200ms"
    run = f"{emulated} --steps 48 --codec float32"
    summary = train(write_text(tmp_path), tmp_path / "run", run)
    plan = read(f"{SMALL.removesuffix('--data')} {run} --model.arguments.vocab-size 257", capsys)
    assert plan["site"]["links"] == [{"bandwidth_bits_per_s": 1.5e5, "latency_s": 0.05}] * 2
    own = plan["prediction"]
    assert own["p90_utilization"] < own["compute_utilization"] <= own["ideal_utilization"] < 0.9
    assert own["ideal_utilization"] == pytest.approx(summary["compute_utilization"], abs=0.05)


def test_work_that_was_not_measured_and_a_round_that_its_timeout_would_end_are_noted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = f"{SIZE} --replicas 2 {LINK} --codec bfloat16 --device"
    assert "ns per value for sends" in output_of(f"{arguments} cpu", capsys)
    assert "not measured" in output_of(f"{arguments} cuda", capsys)
    fragments = read(f"{arguments} cuda", capsys)["prediction"]["fragments"]
    assert [(each["values"], each["sent_bytes"]) for each in fragments] == [(1_750_000_000, 3.5e9)] * 4

    assert "exceed network.round_timeout=10m00s" in output_of(f"{SIZE} --bandwidth 10Mbit --step-time 1s", capsys)
    assert "round_timeout_s" not in output_of(f"{SIZE} --bandwidth 1Gbit --step-time 1s", capsys)


@pytest.mark.parametrize(("rank", "dtype"), [(0, "float32"), (4, "bfloat16")])
def test_the_memory_is_what_a_replica_keeps(
    rank: int, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, lora = write_base(tmp_path), {"base_dtype": dtype} if rank else {}
    flags = f"--lora-rank {rank} --model.arguments.base-dtype {dtype}" if rank else ""
    plan = read(f"--model hf:{base} {flags} --replicas 2 --fragments 1 --sync.outer sgd {LINK}", capsys)
    model = build_language_model(ModelSettings(source=f"hf:{base}", lora_rank=rank, arguments=lora), seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    loop = DiLoCo(model, optimizer, outer_optimizer=Sgd(learning_rate=1.0), schedule=SyncSchedule(inner_steps=2))
    tokens = torch.arange(16).reshape(2, 8) + 60
    model.loss(tokens[:, :-1], tokens[:, 1:]).loss.backward()
    optimizer.step()
    kept = [*model.parameters(), *(parameter.grad for parameter in trained)]
    kept += loop.named_global_params().values()
    kept += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    num_bytes = sum(value.numel() * value.element_size() for value in kept if value is not None)
    assert plan["model"]["memory_bytes"] == num_bytes
    assert plan["model"]["trained"] == sum(parameter.numel() for parameter in trained)


def test_a_slow_uplink_moves_what_is_sent_to_others_and_adds_nothing_to_its_price(
    capsys: pytest.CaptureFixture[str],
) -> None:
    same = (
        "--replicas 4 --congestion-control bbr --step-time 1s --price-per-gb 1 --sync.arguments.average.codec float32"
    )
    alike, apart = (
        read(f"{SIZE} --algorithm diloco --fragments 1 --bandwidth {rates} {same}", capsys)
        for rates in ("1Gbit", "1Gbit 1Gbit 1Gbit 20Mbit")
    )
    assert apart["prediction"]["sent_bytes_per_step"] > 1.05 * alike["prediction"]["sent_bytes_per_step"]
    assert apart["cost_of_sending"] == pytest.approx(alike["cost_of_sending"], rel=1e-6)
