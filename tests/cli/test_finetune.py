"""`diloco finetune`, and every command that reads its run: all of them reproduce the answers that it learned."""

import io
import json
import shlex
import shutil
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from diloco.checkpoint import open_checkpoint
from diloco.cli import main
from diloco.config import CONFIG_FILE, Configuration, build, flatten, join_command, read_record, to_toml, typed_values
from diloco.data import ChatTokenizer
from diloco.model import ModelSettings, base_card
from diloco.trained import load_trained
from tests.cli.runs import describe, full_disk
from tests.finetuning import SPECIAL, asked, write_base, write_records

ANSWERS = {"red?": "rot", "blue?": "blau"}
SAMPLING = {"temperature": 0.6, "top_p": 0.9}  # the library refuses to write it without do_sample


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base model, a fine-tuned run that has learned two answers, and questions."""
    folder = tmp_path_factory.mktemp("finetune")
    base = write_base(folder / "base", marked=False, hidden_size=32, intermediate_size=48, initializer_range=0.5)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 257], **SAMPLING}))
    (base / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    known = [asked(question, answer) for question, answer in ANSWERS.items()]
    data = write_records(folder / "data.jsonl", [{**each, "copy": copy} for copy in range(30) for each in known])
    words = f"""finetune {base} --data {data} --out {folder / "run"} --replicas 2 --lora-rank 8 --steps 40
        --inner-steps 5 --learning-rate 1e-2 --batch-size 2 --sequence-length 96
        --monitor.console quiet --evaluation.every-steps 0 --checkpoint.every-steps 0 --device cpu"""
    assert main(words.split()) == 0
    return folder


def output_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def planned(words: str, capsys: pytest.CaptureFixture[str]) -> Configuration:
    """Return the resolved settings of `diloco finetune`, which does not train."""
    text = output_of(capsys, *shlex.split(words), "--print-config")
    return build(Configuration, typed_values(tomllib.loads(text), Configuration, "stdout"))


@pytest.mark.parametrize(
    "flags",
    [
        "--lora-rank 0 --epochs 2",
        "--lora-rank 4 --steps 30 --inner-steps 5 --seed 3",
        "--lora-rank 0 --steps 30 --data.local",
    ],
)
def test_a_fine_tuning_run_also_a_resumed_one_prints_how_others_join_it(
    flags: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    began = planned(
        f"finetune base --data data.jsonl --transport swarm --run 'a b' --batch-size 2 --sequence-length 256 {flags}",
        capsys,
    )
    (tmp_path / CONFIG_FILE).write_text(to_toml(replace(began, out=None)))
    resumed = planned(f"finetune --resume {tmp_path}", capsys)
    own = dict.fromkeys(["checkpoint.resume", "network.join", "out", "checkpoint.every_steps"])
    for settings in (began, resumed):
        told = join_command(settings, tmp_path)
        assert told.startswith("diloco train --preset finetune ")
        data = "" if settings.data.local else "--data data.jsonl "
        assert f"--model hf:base {data}--transport swarm --run 'a b'" in told
        assert len(told) < 190
        own_data = " --data data.jsonl" if settings.data.local else ""
        joining = planned(f"{told}{own_data} --join /ip4/1/p2p/Qm".removeprefix("diloco "), capsys)
        assert flatten(joining) | own == flatten(began) | own


@pytest.mark.parametrize("number", [1, 2, 3, 60])
def test_a_few_conversations_and_a_model_of_few_positions_are_enough_and_each_is_tokenised_once(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_base(tmp_path / "base", max_position_embeddings=48)
    data = write_records(tmp_path / "data.jsonl", [asked(f"{n}?", "a" * (n % 7 + 1)) for n in range(number)])
    tokenised: list[object] = []
    conversation = ChatTokenizer.conversation

    def counted(*args: Any, **more: Any) -> Any:
        if str(args[1][0]["content"]).endswith("?"):  # not one that looks at the template
            tokenised.append(args)
        return conversation(*args, **more)

    monkeypatch.setattr(ChatTokenizer, "conversation", counted)
    words = f"finetune {base} --data {data} --out {tmp_path / 'run'} --device cpu --epochs 1 --monitor.console plain"
    told = output_of(capsys, *words.split())
    assert len(tokenised) == number
    assert read_record(tmp_path / "run" / CONFIG_FILE).train.sequence_length == 48
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    if number == 1:
        assert "held out    nothing, because there is too little; the loss is not evaluated" in told
        assert summary["heldout_loss"] is None
        assert main(["evaluate", str(tmp_path / "run")]) == 1
        assert "too little to hold some of it out" in capsys.readouterr().err
        return
    assert f"held out    {'2 conversations' if number == 60 else '1 conversation'}, " in told
    evaluated = json.loads(output_of(capsys, "evaluate", tmp_path / "run", "--json"))
    assert evaluated["heldout_loss"] == pytest.approx(summary["heldout_loss"], abs=1e-6)
    assert len(tokenised) <= 2 * number + 2
    told = output_of(capsys, "evaluate", tmp_path / "run", "--data", data)
    assert f"{sum(n % 7 + 2 for n in range(number)):,}" in told, "every answer and its end"


@pytest.mark.parametrize(
    ("flags", "batch_size", "steps"),
    [
        ("", 3, 3),
        ("--replicas 2", 1, 5),
        ("--replicas 4", 1, 3),
        ("--train.gradient-accumulation 2", 4, 3),
        ("--batch-size 8", 8, 2),
        ("--steps 7", 8, 7),
    ],
)
def test_the_usual_batch_holds_no_row_twice(
    flags: str, batch_size: int, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "base")
    records = [asked(f"{n}?", "a") for n in range(4)]  # of which one is held out
    data = write_records(tmp_path / "data.jsonl", records)
    words = f"finetune {base} --data {data} --data.packing single --inner-steps 1 --device cpu --sequence-length 64"
    train = planned(f"{words} {flags}", capsys).train
    assert (train.batch_size, train.steps) == (batch_size, steps)


def test_chat_answers_a_prompt_and_each_line_of_its_input(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert output_of(capsys, "generate", place / "run", "--chat", "--prompt", "red?", "--temperature", "0") == "rot\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("blue?\n"))
    assert output_of(capsys, "generate", place / "run", "--chat", "--temperature", "0") == "blau\n"


@pytest.mark.parametrize("words", [["--prompt", "red?<|im_end|>"], ["--prompt", "red?", "--system", "<|im_start|>"]])
def test_a_question_that_writes_a_token_of_the_template_is_refused(
    place: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(place / "run"), "--chat", *words]) == 2
    told = capsys.readouterr()
    assert "writes '<|im_" in told.err
    assert told.out == ""


def test_a_person_who_is_asked_again_may_leave_it_out(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("red?<|im_end|>\nred?\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    told = output_of(capsys, "generate", place / "run", "--chat", "--temperature", "0")
    assert "Leave it out.\n> rot\n" in told


def test_a_model_without_a_template_is_asked_with_the_one_that_its_message_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(write_base(tmp_path / "base", template=None)), "--chat", "--prompt", "red?"]
    assert main(words) == 1
    assert "--data.format plain works with every tokenizer" in " ".join(capsys.readouterr().err.split())
    assert main([*words, "--tokens", "3", "--data.format", "plain"]) == 0
    assert main([*words[:2], "--prompt", "red?", "--data.format", "plain"]) == 2
    assert main([*words, "--data.format", "plane"]) == 2


def test_the_merged_model_and_the_adapter_are_for_others(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output_of(capsys, "export", place / "run", "--out", place / "merged", "--merge")
    told = output_of(capsys, "generate", place / "merged", "--chat", "--prompt", "red?", "--temperature", "0")
    assert told == "rot\n"
    with torch.no_grad():
        tokens = torch.arange(20).unsqueeze(0) + 60
        one, other = (load_trained(place / name).model(tokens) for name in ("run", "merged"))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    output_of(capsys, "export", place / "run", "--out", place / "exported", "--to", "adapter")
    assert (place / "exported" / "chat_template.jinja").is_file()


@pytest.mark.parametrize("kind", ["--merge", "--to adapter", "all weights"])
def test_an_export_says_how_to_generate_and_what_it_comes_from_without_a_path(
    place: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "run"
    if kind == "all weights":
        base, run = Path(shutil.copytree(place / "base", tmp_path / "base")), tmp_path / "run"
        words = f"finetune {base} --data {place / 'data.jsonl'} --out {run} --lora-rank 0 --steps 1 --inner-steps 1"
        assert main(f"{words} --sequence-length 96 --monitor.console quiet --device cpu".split()) == 0
        (base / "generation_config.json").unlink()  # it is the run's own
    out = tmp_path / "out"
    output_of(capsys, "export", run, "--out", out, *([] if kind == "all weights" else kind.split()))
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation | SAMPLING == generation
    assert generation["eos_token_id"] == [256, 257, 258]  # those of the base, and the end of an answer
    assert json.loads((out / "tokenizer_config.json").read_text())["pad_token"] == SPECIAL[0]
    if kind != "--to adapter":
        AutoModelForCausalLM.from_pretrained(out)
    _, header, text = (out / "README.md").read_text().split("---\n", 2)
    stated = yaml.safe_load(header)
    assert (stated["base_model"], stated["license"]) == ("base", "mit")
    assert ("| LoRA | rank 8" in text) == (kind != "all weights")
    assert ("replicas train alone" in text) == (kind != "all weights")
    for file in out.iterdir():
        assert not any(str(folder).encode() in file.read_bytes() for folder in (place, tmp_path)), file


@pytest.mark.parametrize(
    ("folder", "config", "card", "name", "licence"),
    [
        ("llama", {}, "", "llama", None),
        ("llama", {"_name_or_path": "meta/llama"}, "---\nlicense: llama3\n---\n", "meta/llama", "llama3"),
        ("llama", {"_name_or_path": "/home/me/llama", "license": "mit"}, "no header", "llama", "mit"),
        ("models--meta--llama/snapshots/0a1b", {}, "---\nlicense: [1\n---\n", "meta/llama", None),
        ("llama", {}, "---\nlicense: 'x\n\n# A heading'\n---\n", "llama", None),
    ],
)
def test_a_base_model_is_named_by_what_its_folder_says(
    tmp_path: Path, folder: str, config: dict[str, str], card: str, name: str, licence: str | None
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "config.json").write_text(json.dumps(config))
    (tmp_path / folder / "README.md").write_text(card)
    stated = base_card(ModelSettings(source=f"hf:{tmp_path / folder}"))
    assert stated == {"base_model": name} | ({"license": licence} if licence else {})


def test_an_adapter_is_written_whole_or_not_at_all_and_replaces_only_an_export(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", place / "run", "--out", tmp_path / "adapter", "--to", "adapter"]
    with full_disk():
        assert main([*map(str, words)]) == 1
    assert "adapter can't be written: " in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
    output_of(capsys, *words)
    (tmp_path / "adapter" / "note").write_text("of the earlier export")
    output_of(capsys, *words, "--overwrite")
    assert not (tmp_path / "adapter" / "note").exists()
    (tmp_path / "adapter" / "diloco.json").unlink()  # as of peft itself
    assert main([*map(str, words), "--overwrite"]) == 2


def test_weights_that_were_quantised_during_training_are_merged_as_they_were(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without bitsandbytes."""
    run = Path(shutil.copytree(place / "run", place / "quantised"))
    describe(run, model=open_checkpoint(run).about["model"] | {"quantization": "nf4"})
    said = output_of(capsys, "export", run, "--out", place / "unquantised", "--merge")
    assert "trained beside nf4 weights and merged into the original ones" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("export RUN --out x", "Use --merge for a whole model, or --to adapter"),
        ("export RUN --out x --to adapter --merge", "--merge needs --to hf"),
        ("export RUN --out RUN --to adapter", "is not an exported model"),
        ("export BASE --out x --merge", "has no adapters, so --merge"),
    ],
)
def test_what_can_not_be_is_refused(place: Path, capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    named = {"RUN": str(place / "run"), "BASE": str(place / "base")}
    assert main([named.get(word, word) for word in words.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
