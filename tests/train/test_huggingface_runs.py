"""Models of `transformers` in `diloco train`: the results, and what a checkpoint needs."""

import json
import shutil
from pathlib import Path

import pytest

from diloco.checkpoint import open_checkpoint
from diloco.cli import main
from diloco.config import plan_run
from diloco.data import ByteTokenizer
from diloco.errors import ConfigurationError
from diloco.trained import load_trained
from tests.command_lines import command_line
from tests.huggingface import write_config
from tests.train.source_runs import plan_of, trained


def test_replicas_of_a_model_with_routing_agree_to_the_bit(data: Path, tmp_path: Path) -> None:
    """Two rounds per fragment, in four bits with overlap."""
    plan = plan_of(f"hf:{write_config(tmp_path, 'Qwen3-MoE')}", data, train__steps=14)
    summary = trained(tmp_path / "run", plan)
    assert plan.configuration.sync.codec == "fp4"
    assert plan.configuration.sync.num_fragments == 2
    assert summary["rounds_committed"] == 6
    checkpoint = open_checkpoint(tmp_path / "run")
    assert all(fragment["outer_step"] >= 2 for fragment in checkpoint.about["fragments"])
    names = {name for fragment in checkpoint.about["fragments"] for name in fragment["parameters"]}
    assert names == checkpoint.load("global").keys()
    model = load_trained(tmp_path / "run").model
    assert names == {name for name, _ in model.named_parameters()}
    assert summary["heldout_loss"] < 5.7  # ln(272) = 5.6 at the start


def test_a_run_resumes_exactly_and_is_evaluated_when_its_source_is_gone(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has dropout, four bits with error feedback and the model's own tokeniser, and stops between rounds."""
    folder = write_config(tmp_path, "GPT-2")
    ByteTokenizer().save(folder)
    values = {"sync__error_feedback": 1.0, "network__replicas": 2}
    whole = plan_of(f"hf:{folder}", data, **values)
    assert whole.configuration.data.tokenizer == str(folder)
    straight = trained(tmp_path / "straight", whole)
    trained(tmp_path / "run", plan_of(f"hf:{folder}", data, train__stop_after=7, **values))
    resumed = plan_run(command_line(checkpoint__resume=tmp_path / "run", train__stop_after=12))
    assert trained(tmp_path / "run", resumed)["global_params_digest"] == straight["global_params_digest"]
    shutil.rmtree(folder)

    run = str(tmp_path / "run")
    assert main(["evaluate", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["heldout_loss"] == straight["heldout_loss"]
    assert main(["generate", run, "--prompt", "alpha", "--tokens", "3"]) == 0
    assert main(["status", run]) == 0
    assert "GPT2LMHeadModel" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"cannot change model\.source"):
        plan_run(command_line(checkpoint__resume=tmp_path / "run", model__source="hf:another"))
