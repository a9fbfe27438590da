"""A model of `transformers` in `diloco train`: the same bits after a stop, and what a checkpoint needs."""

import json
import shutil
from pathlib import Path

import pytest

from diloco.cli import main
from diloco.config import plan_run
from diloco.data import ByteTokenizer
from diloco.errors import ConfigurationError
from tests.command_lines import command_line
from tests.huggingface import write_config
from tests.train.source_runs import plan_of, trained


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
