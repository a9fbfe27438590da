"""A model and its tokenizer belong together: which tokenizer a run takes, and what is said or refused."""

import shutil
from pathlib import Path

import pytest

from diloco.cli import main
from diloco.config import compose, parse_arguments, plan_run
from diloco.data import ByteTokenizer, load_tokenizer
from diloco.errors import ConfigurationError
from tests.command_lines import command_line
from tests.finetuning import asked, write_base, write_records, write_tokenizer
from tests.huggingface import write_config
from tests.vocabularies import END, byte_level


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture
def bare(base: Path, tmp_path: Path) -> Path:
    """A folder with weights and without a tokenizer."""
    place = shutil.copytree(base, tmp_path / "bare")
    for file in (*place.glob("*token*"), *place.glob("*.jinja")):
        file.unlink()
    return place


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The files of a run with a vocabulary of its own, and the folder of one of its checkpoints."""
    place = tmp_path / "run"
    (place / "checkpoints" / "step-00000002").mkdir(parents=True)
    byte_level(*END).save(str(place / "tokenizer.json"))
    return place


@pytest.fixture
def hub(base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A hub with one repository; the list gets the names and revisions that are fetched."""
    import huggingface_hub

    fetched: list[str] = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        fetched.append(f"{name} {revision}")
        assert not any(pattern.endswith((".bin", ".py")) for pattern in allow_patterns)
        return str(base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    return fetched


def tokenizer_of(**values: object) -> str:
    return compose(command_line(**values)).data.tokenizer


def test_a_run_takes_the_tokenizer_of_the_model_that_it_begins_from(base: Path, run: Path, tmp_path: Path) -> None:
    assert tokenizer_of(model__source=f"hf:{base}") == str(base)
    assert tokenizer_of(model__source="hf:somebody/llama@v2") == "hf:somebody/llama@v2"
    assert tokenizer_of(model__source="hf:somebody/llama", preset="streaming-35m") == "hf:somebody/llama"
    assert tokenizer_of(train__init_from=run) == str(run)
    assert tokenizer_of(train__init_from=run / "checkpoints" / "step-00000002", preset="streaming-35m") == str(run)
    assert tokenizer_of(train__init_from=base / "model.safetensors") == str(base)
    assert tokenizer_of(model__source=f"hf:{base}", train__init_from=run) == str(run)
    (old := tmp_path / "old").mkdir()
    (old / "tokenizer.model").touch()  # which transformers converts
    assert tokenizer_of(model__source=f"hf:{old}") == f"hf:{old}"
    ByteTokenizer().save(run)
    assert tokenizer_of(train__init_from=run) == "bytes"


@pytest.mark.parametrize("command", ["train", "plan", "finetune"])
def test_weights_without_a_tokenizer_ask_for_one(
    command: str, bare: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_records(tmp_path / "chat.jsonl", [asked("a", "b")] * 20)
    flags = f"--data {data} --model hf:{bare}" + (" --bandwidth 1Gbit --step-time 1s" if command == "plan" else "")
    assert main([command, *flags.split()]) == 2
    assert "bare has weights but no tokenizer. Name the one" in capsys.readouterr().err
    assert tokenizer_of(model__source=f"hf:{bare}", data__tokenizer=str(base)) == str(base)
    assert tokenizer_of(model__source=f"hf:{bare}", model__arguments__weights="fresh") == "bytes"
    assert tokenizer_of(model__source=f"hf:{write_config(tmp_path, 'Llama')}") == "bytes"


def test_another_tokenizer_than_that_of_the_weights_is_told(base: Path, run: Path, tmp_path: Path) -> None:
    def notes(words: str) -> list[str]:
        return [note for note in plan_run(parse_arguments(words.split())).notes if "trained with the tokenizer" in note]

    model, copy = f"--model hf:{base}", shutil.copytree(base, tmp_path / "copy")
    assert notes(f"{model} --tokenizer bytes")[0].startswith("The weights that this run begins from were trained with")
    assert notes(f"{model} --tokenizer {run}")
    assert notes(f"--init-from {run} --tokenizer bpe:300")
    for same in ("", f"--tokenizer hf:{base}", f"--tokenizer {base}/tokenizer.json", f"--tokenizer {copy}"):
        assert not notes(f"{model} {same}")
    assert not notes(f"{model} --tokenizer bytes --model.arguments.weights fresh")


def test_a_model_of_the_hub_is_fine_tuned_with_its_own_tokenizer(
    hub: list[str], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_records(tmp_path / "chat.jsonl", [asked(f"{n}?", f"{n}!") for n in range(60)])
    flags = f"--model hf:somebody/llama@v2 --data {data} --lora-rank 2 --steps 2 --out run --sequence-length 64"
    assert main(["finetune", *flags.split()]) == 0, capsys.readouterr().err
    assert {*hub} == {"somebody/llama v2"}
    assert load_tokenizer(tmp_path / "run").to_json() == load_tokenizer(base).to_json()


@pytest.mark.parametrize(
    "words",
    [
        "train --model hf:{model} --data {data} --steps 2 --out {out}",
        "train --model hf:{model} --data {data} --print-config",
        "plan --model hf:{model} --bandwidth 1Gbit --step-time 1s",
        "generate {model} --prompt a",
        "evaluate {model} --data {data}",
        "export {model} --out {out}",
    ],
)
def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data, out = write_base(tmp_path / "model", vocab_size=200), tmp_path / "a.txt", tmp_path / "out"
    data.write_text("a text\n" * 4000)
    assert main(words.format(model=model, data=data, out=out).split()) == 2
    assert "has 259 tokens, but the model has a vocabulary of 200" in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_without_a_tokenizer_generates_nothing(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(bare)]) == 2
    assert "bare has no tokenizer. Copy that of the model there" in capsys.readouterr().err
    write_tokenizer(bare)
    assert main(["generate", str(bare), "--tokens", "2"]) == 0


def test_tokens_of_another_tokenizer_than_the_models_are_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a text\n" * 4000)
    assert main(f"tokenize --data {tmp_path / 'a.txt'} --out {tmp_path / 'tokens'}".split()) == 0
    assert main(f"train --model hf:{base} --data {tmp_path / 'tokens'} --steps 1 --out {tmp_path / 'run'}".split()) == 2
    assert "was made with another one. Make it again with that one" in capsys.readouterr().err


def test_a_name_that_is_no_model_is_an_error_of_the_model() -> None:
    with pytest.raises(ConfigurationError, match="can't be used"):
        plan_run(parse_arguments(["--model", "hf:a b"]))
