"""Folders from elsewhere: what a run, a checkpoint, a model or a tokenizer says chooses no code that runs here."""

import ast
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diloco.cli import main
from diloco.config import parse_arguments, plan_run, resume_command
from diloco.data import MAX_TOKENIZER_BYTES, DataSettings, make_tokenizer
from diloco.errors import CheckpointError, ConfigurationError, DataError
from diloco.model import ModelSettings, base_card, build_language_model, stored_tensors
from diloco.plugins import call
from tests.cli.runs import SMALL, describe, refused, write_documents
from tests.finetuning import write_base, write_tokenizer
from tests.lazy import Lazy

transformers = Lazy("transformers")

KEYS = ("model.source", "sync.codec", "sync.outer", "sync.average", "sync.merge", "optimizer.name", "monitor.sinks")
ROOT = Path(__file__).parent.parent
NETS = """
import torch
from pathlib import Path
from os import system
Path(r"{marker}").touch()

class Net(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 4)
        self.head = torch.nn.Linear(4, vocab_size)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))

def build(vocab_size):
    return Net(vocab_size)
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `nets.py` and the runs `native` and `own`, of a model that it builds, stopped before their end."""
    folder = tmp_path_factory.mktemp("given")
    write_documents(folder)
    (folder / "nets.py").write_text(NETS.format(marker=folder / "ran"))
    (folder / "run.toml").write_text(SMALL)
    data = ["--data", str(folder / "text.jsonl"), "--stop-after", "4", "--out"]
    assert main(["train", str(folder / "run.toml"), *data, str(folder / "native")]) == 0
    (folder / "own.toml").write_text(SMALL.replace(SMALL[SMALL.index("[model.arguments]") : SMALL.index("[data]")], ""))
    named = ["--model", str(folder / "nets.py") + ":build", "--sync.fragment-strategy", "balanced"]
    assert main(["train", str(folder / "own.toml"), *named, *data, str(folder / "own")]) == 0
    return folder


@pytest.fixture
def place(given: Path, tmp_path: Path) -> Path:
    """A copy of the runs, in which `ran` appears when `nets.py` or a command of a test is executed."""
    shutil.copytree(given, tmp_path / "given")
    (tmp_path / "given" / "nets.py").write_text(NETS.format(marker=tmp_path / "given" / "ran"))
    (tmp_path / "given" / "ran").unlink()
    return tmp_path / "given"


def rename(run: Path, key: str, name: str) -> None:
    """Let the settings and all checkpoints of a run name other code."""
    section, _, leaf = key.partition(".")
    record = run / "config.toml"
    lines = [line for line in record.read_text().splitlines() if not line.startswith(f"{leaf} = ")]
    value = json.dumps([name] if key == "monitor.sinks" else name)
    lines.insert(lines.index(f"[{section}]") + 1, f"{leaf} = {value}")
    record.write_text("\n".join(lines) + "\n")
    touch = {"command": f"touch {shlex.quote(str(run.parent / 'ran'))}"}
    for folder in (run / "checkpoints").glob("step-*"):
        model = {"source": name, "arguments": touch if name == "os:system" else {}, "vocab_size": 257}
        if key == "model.source":
            describe(folder, model=model)


def commands(run: Path) -> dict[str, list[str]]:
    """Return every command that builds what a run's folder describes."""
    return {
        "generate": ["generate", str(run), "--prompt", "x", "--tokens", "2"],
        "evaluate": ["evaluate", str(run)],
        "export": ["export", str(run), "--out", str(run.parent / "out")],
        "resume": ["train", "--resume", str(run)],
        "resume elsewhere": ["train", "--resume", str(run), "--out", str(run.parent / "on")],
        "print": ["train", "--resume", str(run), "--print-config"],
        "finetune": ["finetune", "--resume", str(run)],
    }


@pytest.mark.parametrize("command", commands(Path("x")))
@pytest.mark.parametrize("name", ["os:system", "nets.py:build"])
def test_a_folder_that_names_a_model_runs_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    monkeypatch.chdir(place)  # where nets.py lies
    run = place / "own"
    rename(run, "model.source", name)
    said = refused(commands(run)[command], capsys)
    assert f"add --model {name} to the command" in said
    assert not (place / "ran").exists()


@pytest.mark.parametrize("key", [key for key in KEYS if key != "model.source"])
def test_a_resumed_folder_names_no_code(place: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    rename(place / "native", key, f"{place}/nets.py:build")
    said = refused(["train", "--resume", str(place / "native")], capsys)
    assert f"add --{key} {place}/nets.py:build to the command" in said
    assert main(["generate", str(place / "native"), "--tokens", "1"]) == 0  # needs only the model
    assert not (place / "ran").exists()


@pytest.mark.parametrize("command", ["generate", "evaluate", "resume", "resume elsewhere", "print"])
def test_code_that_the_user_names_again_runs(place: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Its file may lie elsewhere on this machine; the printed command names it."""
    monkeypatch.chdir(place)
    named = [*commands(place / "own")[command], "--model", "nets.py:build"]
    assert main(named) == 0
    assert (place / "ran").exists()
    if command == "print":
        settings = plan_run(parse_arguments(named[1:])).configuration
        assert main([*shlex.split(resume_command(settings, place / "own"))[1:], "--print-config"]) == 0


@pytest.mark.parametrize("command", ["generate", "evaluate", "export", "resume"])
def test_other_code_is_not_taken_for_it(place: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    other = [*commands(place / "own")[command], "--model", f"{place}/nets.py:Net"]
    assert f"--model {place}/nets.py:Net is other code" in refused(other, capsys)
    native = [*commands(place / "native")[command], "--model", f"{place}/nets.py:build"]
    assert "Leave it out" in refused(native, capsys) or command == "resume"
    assert not (place / "ran").exists()


def test_what_is_to_be_pasted_is_quoted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "$(touch ran);x.py:build"
    rename(place / "native", "model.source", name)
    assert f"add --model {shlex.quote(name)} to" in refused(commands(place / "native")["generate"], capsys)


MODELS: tuple[Any, ...] = (
    *(None, "nets.py:build", {"source": ["os:system"]}, {"unknown": 1}),
    *({"width": 8.0}, {"base_dtype": "os"}, {"lora_targets": [3]}, {"arguments": "x"}),
)
INVALID: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("generate", {"model": model}) for model in MODELS),
    *(("generate", {name: value}) for name, value in (("sequence_length", 2**63), ("seed", True), ("definition", 3))),
    *(("status", {name: [{"index": 1}]}) for name in ("fragments", "definition", "rounds_in_flight")),
)


@pytest.mark.parametrize(("command", "about"), INVALID, ids=str)
def test_a_manifest_with_an_invalid_value_is_refused_without_a_traceback(
    place: Path, capsys: pytest.CaptureFixture[str], command: str, about: dict[str, Any]
) -> None:
    describe(place / "native", **about)
    arguments = (commands(place / "native") | {"status": ["status", str(place / "native")]})[command]
    assert "not valid" in refused(arguments, capsys, code=1)


@pytest.mark.parametrize(
    "definition", [{"x": 1}, {"config": 3}, {"config": {"model_type": "llama", "hidden_size": "x"}}]
)
def test_a_malformed_definition_is_refused(definition: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="the checkpoint"):
        build_language_model(ModelSettings(source="hf:gone"), seed=0, definition=definition)


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        *(("sync.codec", name, "of the library") for name in ("os:system", "builtins:exec", "pickle:loads")),
        ("model.source", "torch.hub:load", "of the library torch"),
        ("model.source", "NETS:system", "of the library posix"),
        ("model.source", "torch:Tensor", "of the library torch"),
    ],
)
def test_what_a_name_means_is_checked_before_it_is_called(tmp_path: Path, key: str, name: str, words: str) -> None:
    (tmp_path / "nets.py").write_text(NETS.format(marker=tmp_path / "imported"))
    text = name.replace("NETS", str(tmp_path / "nets.py"))
    with pytest.raises(ConfigurationError, match=words):
        call(key, text, kind=nn.Module, arguments={"command": f"touch {tmp_path}/ran"})
    assert not (tmp_path / "ran").exists()


LOADERS = ("from_pretrained", "from_config", "load_dataset")


def test_every_call_that_could_run_code_of_a_folder_forbids_it() -> None:
    calls = 0
    for file in itertools.chain(*((ROOT / folder).rglob("*.py") for folder in ("src", "examples", "benchmarks"))):
        text = file.read_text("utf-8")
        for node in ast.walk(ast.parse(text if any(name in text for name in LOADERS) else "")):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOADERS:
                trust = [ast.unparse(each.value) for each in node.keywords if each.arg == "trust_remote_code"]
                assert trust == ["False"], (file, node.lineno)
                calls += 1
    assert calls


EVIL = (
    "from pathlib import Path\nPath(r'{marker}').touch()\nfrom transformers import {base}\nclass Evil({base}): pass\n"
)


def asking_tokenizer(folder: Path) -> Callable[[], object]:
    write_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "evil.py").write_text(EVIL.format(marker=folder / "ran", base="PreTrainedTokenizerFast"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return lambda: make_tokenizer(DataSettings(tokenizer=f"hf:{folder}"))


def asking_model(folder: Path, **changes: Any) -> Callable[[], object]:
    write_base(folder)
    (folder / "evil.py").write_text(EVIL.format(marker=folder / "ran", base="LlamaForCausalLM"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"}} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return lambda: build_language_model(ModelSettings(source=f"hf:{folder}"), seed=0)


@pytest.mark.parametrize(
    "asking",
    [asking_tokenizer, asking_model, lambda folder: asking_model(folder, model_type="evil")],
    ids=["tokenizer", "known model", "unknown model"],
)
def test_a_folder_gets_no_answer_when_it_asks_to_run_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asking: Callable[[Path], Callable[[], object]]
) -> None:
    load = asking(tmp_path)
    alarms: list[int] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    try:
        load()
    except (DataError, ConfigurationError) as error:
        assert "trust_remote_code=True" not in str(error)  # noqa: PT017 - all kinds of error
    assert not (tmp_path / "ran").exists()
    assert sys.stdin.read() == "y\n" * 9
    assert not alarms


ODD: tuple[dict[str, Any], ...] = (
    {"attn_implementation": {"": "org/kernel"}},
    {"_attn_implementation_internal": "org/kernel"},
    {"text_config": {"attn_implementation": "org/kernel"}},
    {"layers": [{"attn_implementation": ["org/kernel"]}]},
    {"_experts_implementation": "org/kernel"},
    {"attn_implementation": "flash_attention_2"},  # not installed here, so it would come from the hub
)


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_configuration_names_only_known_implementations(tmp_path: Path, odd: dict[str, Any]) -> None:
    load = asking_model(tmp_path, **odd)
    with pytest.raises(ConfigurationError, match=r"code from elsewhere is not run\. Known are eager, sdpa"):
        load()
    model: Any = asking_model(tmp_path)()
    definition = model.definition()
    definition["config"] |= odd  # as a checkpoint has it
    with pytest.raises(ConfigurationError, match=r"the checkpoint has .*code from elsewhere is not run"):
        build_language_model(ModelSettings(source="hf:gone"), seed=0, definition=definition)
    name, value = next(iter(odd.items()))
    settings = ModelSettings(source=f"hf:{tmp_path}", arguments={name: value})
    if name != "layers":
        with pytest.raises(ConfigurationError, match=r"code from elsewhere|is not a part of|Expected `str"):
            build_language_model(settings, seed=0, device="meta")


def add_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/other", "megatron_core": "evil"})
    )
    (folder / "adapter_model.bin").write_bytes(b"a pickle")


def add_other_weights(folder: Path) -> None:
    other = write_base(folder.parent / "other", seed=1)
    shutil.copy(other / "model.safetensors", folder / "others.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "others.safetensors"}))


def add_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")


def add_generate(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"open(r'{folder}/ran', 'w')\ndef generate(): pass\n")
    (folder / "generation_config.json").write_text(json.dumps({"custom_generate": "custom_generate/generate.py"}))


@pytest.mark.parametrize("add", [add_adapter, add_other_weights, add_pickle, add_generate])
def test_a_model_is_the_weights_that_its_digest_is_of_whatever_else_is_in_its_folder(
    tmp_path: Path, add: Callable[[Path], None]
) -> None:
    folder = write_base(tmp_path / "base")
    add(folder)
    model: Any = build_language_model(ModelSettings(source=f"hf:{folder}"), seed=0)
    state = model.wrapped.state_dict()
    assert all(torch.equal(state[name], value) for name, value in stored_tensors(folder).items())
    assert not (folder / "ran").exists()


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_large(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)  # without blocks on the disk


NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        *((as_fifo, name, "not a regular file|has no |no complete checkpoint") for name in NEEDED),
        *((as_large, name, r"has more than [\d,]+ bytes") for name in NEEDED[:3]),
        (as_large, "generation_config.json", r"has more than [\d,]+ bytes"),
    ],
)
def test_a_file_that_never_ends_or_is_huge_is_refused_before_it_is_read(
    change: Callable[[Path], None], name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_base(tmp_path / "base")
    (folder / "generation_config.json").write_text("{}")
    change(folder / name)
    assert main(["generate", str(folder), "--chat", "--prompt", "q", "--tokens", "1", "--device", "cpu"]) in (1, 2)
    said = capsys.readouterr().err
    assert re.search(words, said)
    assert "Traceback" not in said


def test_a_fifo_in_place_of_settings_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "run.toml")
    for command in ("train", "sweep --out a"):
        assert "it is not a regular file" in refused([*command.split(), str(tmp_path / "run.toml")], capsys)


def test_a_licence_that_is_no_text_is_left_out_of_a_card(tmp_path: Path) -> None:
    folder = write_base(tmp_path / "base")
    levels = [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]  # 2 ** 39 items when printed
    lines = ["---", "a0: &a0 [x]", *levels, "license: *a39", "---"]
    (folder / "README.md").write_text("\n".join(lines))
    assert base_card(ModelSettings(source=f"hf:{folder}")) == {"base_model": "base"}


@pytest.mark.parametrize("odd", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_before_they_train(tmp_path: Path, odd: float) -> None:
    folder = write_base(tmp_path / "base")
    weights = dict(stored_tensors(folder))
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], odd)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"model\.norm\.weight in .*base holds NaN or infinity"):
        build_language_model(ModelSettings(source=f"hf:{folder}"), seed=0)


def test_weights_of_another_name_are_named(tmp_path: Path) -> None:
    folder = write_base(tmp_path / "base")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"no weights file model\.safetensors \(weights\.safetensors has another"):
        stored_tensors(folder)


def test_an_adapter_alone_or_beside_weights_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    add_adapter(tmp_path)
    said = refused(["finetune", str(tmp_path), "--data", "chat.jsonl"], capsys)
    assert "holds an adapter alone. Give the folder of its base model" in said
    folder = write_base(tmp_path / "base")
    add_adapter(folder)
    build_language_model(ModelSettings(source=f"hf:{folder}"), seed=0)
    assert f"The adapter in {folder} is not read" in caplog.text
