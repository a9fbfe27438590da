"""Every example runs as a reader would start it."""

import contextlib
import copy
import io
import json
import os
import runpy
import sys
from pathlib import Path

import nbformat
import pytest
import torch

from diloco import DiLoCo, InProcessTransport, SyncSchedule
from tests.processes import Processes, free_port

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = "--steps 12 --inner-steps 5 --overlap-steps 1 --save-steps 6 --batch-size 2 --sequence-length 16 --width 16"


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_no_example_imports_another() -> None:
    """No example imports another, so each can be copied on its own."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    for path in EXAMPLES.glob("*.py"):
        imported = {line.split()[1] for line in path.read_text().splitlines() if line.startswith(("import ", "from "))}
        assert not imported & names, path


def test_the_package_computes_the_bits_of_the_algorithm_written_from_scratch() -> None:
    """`examples/from_scratch.py` and the package: fp4, two fragments, overlap, rebase, Nesterov, two replicas."""
    scratch = runpy.run_path(str(EXAMPLES / "from_scratch.py"))
    expected, losses, _ = scratch["train"]()
    torch.manual_seed(0)
    first = scratch["Model"]()
    models = [first, copy.deepcopy(first)]
    schedule = SyncSchedule(inner_steps=20, num_fragments=2, overlap_steps=2)
    transport = InProcessTransport(2)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.003) for model in models]
    replicas = [
        DiLoCo(model, optimizer, transport=transport.endpoint(m), schedule=schedule, codec="fp4")
        for m, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    ]
    for step in range(1, scratch["STEPS"] + 1):
        for m, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            scratch["train_one_step"](model, optimizer, m, step)
            replicas[m].begin()
        for replica in replicas:
            replica.finish()
    for replica in replicas:
        for fragment, values in zip(replica.fragments, expected, strict=True):
            named = replica.named_global_params()
            order = [name for name, _ in first.named_parameters() if name in fragment.names]
            assert torch.equal(torch.cat([named[name].flatten() for name in order]), values)
    assert losses[-1] < losses[0] / 10


def test_the_example_with_a_plain_loop_trains_saves_and_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("plain_pytorch.py", monkeypatch, *SMALL.split(), "--out", str(tmp_path))
    assert "all replicas end with" in capsys.readouterr().out
    assert torch.load(tmp_path / "step-6.pt", weights_only=True)["step"] == 6
    assert "head.weight" in torch.load(tmp_path / "model.pt", weights_only=True)


def test_the_example_with_accelerate_trains_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("accelerate_loop.py", monkeypatch, *SMALL.split(), "--out", str(tmp_path), "--accumulation", "2")
    assert "'diloco/rounds': 2" in capsys.readouterr().out
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")  # advice for large runs
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning imports LeafSpec from torch
def test_the_example_with_lightning_trains_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("lightning_module.py", monkeypatch, *SMALL.split(), "--out", str(tmp_path))
    assert "head.weight" in torch.load(tmp_path / "model.pt", weights_only=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_the_example_with_adapters_saves_only_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the adapter is saved."""
    run("hf_trainer.py", monkeypatch, *SMALL.split(), "--out", str(tmp_path))
    assert json.loads((tmp_path / "model" / "adapter_config.json").read_text())["r"] == 8


def test_the_example_codec_sends_a_twentieth_of_the_bytes_and_still_learns() -> None:
    """It sends less than a twentieth of the bytes, and with error feedback the loss still falls."""
    found = runpy.run_path(str(EXAMPLES / "custom_codec.py"))["main"](steps=200)
    (plain, plain_bytes), (one_bit, one_bit_bytes) = found["float32"], found["one-bit"]
    assert one_bit_bytes < plain_bytes / 20
    assert plain < one_bit < 0.5


def in_a_cluster(rank: int, port: int, out: Path) -> None:
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in about.items()}
    sys.argv = ["cluster.py", "--replica-size", "2", "--steps", "22"]
    with (out / f"{rank}.txt").open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(EXAMPLES / "cluster.py"), run_name="__main__")


def test_the_example_on_a_cluster_has_one_digest_for_the_same_ranks_of_both_replicas(tmp_path: Path) -> None:
    """Two replicas of two ranks: the same ranks of both have the same digest."""
    with Processes() as processes:
        processes.start(4, in_a_cluster, free_port(), tmp_path)
        processes.results(300)
    said = [(tmp_path / f"{rank}.txt").read_text().split(", ") for rank in range(4)]
    assert [rounds for _, rounds, _ in said] == ["1 rounds"] * 4
    assert [digest for *_, digest in said[:2]] == [digest for *_, digest in said[2:]]


def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    """Every cell runs, with fewer steps than by default."""
    with Processes() as processes:
        processes.start(1, run_cells, EXAMPLES / "first_steps.ipynb", tmp_path)
        printed = processes.results(300)[0]
    assert printed.count("held-out loss") == 3
    assert "10 rounds" in printed


def run_cells(rank: int, path: Path, folder: Path) -> str:
    """Run the cells of a notebook in this process, and return what they print."""
    from IPython.core.interactiveshell import InteractiveShell

    os.environ |= {"STEPS": "2", "OUT": str(folder / "runs"), "IPYTHONDIR": str(folder), "MPLBACKEND": "agg"}
    notebook, shell = nbformat.read(path, as_version=4), InteractiveShell.instance()
    nbformat.validate(notebook)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                shell.run_cell(cell.source).raise_error()
    return printed.getvalue()
