"""User code: the examples of its documentation page in a loop and by the command, and invalid code that is refused."""

import importlib
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco import AverageRule, Codec, MergeRule, OuterOptimizer, make_codec, testing
from diloco.cli import main
from diloco.config import plan_run
from diloco.errors import ConfigurationError
from diloco.plugins import absolute, call, find
from diloco.train import identity, make_inner_optimizer, outline
from tests.cli.runs import SMALL, read_json, refused, write_documents
from tests.command_lines import command_line, load_configuration

EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "components").glob("*.py"))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with the examples, a text, and the settings of a small run."""
    for path in EXAMPLES:
        shutil.copy(path, tmp_path)
    write_documents(tmp_path)
    (tmp_path / "run.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


KINDS: dict[str, type] = {
    "sync.outer": OuterOptimizer,
    "sync.codec": Codec,
    "sync.average": AverageRule,
    "sync.merge": MergeRule,
    "optimizer.name": torch.optim.Optimizer,
}


def made(key: str, file: str, name: str, **arguments: Any) -> Any:
    return call(key, f"{file}.py:{name}", kind=KINDS[key], arguments=arguments)


def test_the_examples_keep_their_contracts(own: Path) -> None:
    testing.check_outer_optimizer(made("sync.outer", "signs", "Signs"))
    testing.check_codec(lambda: made("sync.codec", "largest", "Largest", kept=8))
    testing.check_average_rule(made("sync.average", "median", "Median"))
    testing.check_merge_rule(made("sync.merge", "share", "Share", share=0.25))
    lion = find("optimizer.name", "lion.py:Lion", torch.optim.Optimizer)
    testing.check_inner_optimizer(lambda model: lion(model.parameters(), lr=0.02))


OWN = [
    *("--codec", "largest.py:Largest", "--sync.arguments.codec", "{kept = 8}", "--error-feedback", "1"),
    *("--sync.outer", "signs.py:Signs", "--outer-learning-rate", "0.001"),
    *("--sync.average", "median.py:Median"),
    *("--sync.merge", "share.py:Share", "--sync.arguments.merge", "{share = 0.25}"),
    *("--optimizer.name", "lion.py:Lion", "--learning-rate", "0.0003"),
]


def test_the_examples_train_by_the_command_and_go_on_from_elsewhere(
    own: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whoever resumes names the code again, as the refusal says, since a folder chooses no code."""
    run = ["train", "run.toml", "--data", "text.jsonl", *OWN, "--out"]
    assert main([*run, str(own / "whole")]) == 0
    assert main([*run, str(own / "part"), "--stop-after", "5"]) == 0
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    resumed = ["train", "--resume", str(own / "part")]
    said = refused(resumed, capsys)
    options = said.partition("trust it, add ")[2].partition(" to the command")[0]
    assert main([*resumed, *shlex.split(options)]) == 0
    whole, part = (read_json(own / name / "summary.json") for name in ("whole", "part"))
    assert whole["rounds_committed"] > 0
    assert part["global_params_digest"] == whole["global_params_digest"]


def facts(own: Path, **values: Any) -> Mapping[str, str]:
    configuration = plan_run(command_line(own / "run.toml", **values)).configuration
    return identity(configuration, outline(configuration, 257), "data")


@pytest.mark.parametrize(
    ("fact", "file", "setting", "other"),
    [
        ("codec", "largest", "sync__codec", {"sync__arguments__codec": {"kept": 9}}),
        ("outer optimizer", "signs", "sync__outer", {"sync__outer_momentum": 0.8}),
        ("merge", "share", "sync__merge", {"sync__arguments__merge": {"share": 0.25}}),
    ],
)
def test_replicas_with_other_code_or_arguments_do_not_fit_together(
    own: Path, fact: str, file: str, setting: str, other: dict[str, Any]
) -> None:
    named, code = {setting: f"{file}.py:{file.capitalize()}"}, "code of " + fact.replace(" ", "_")
    base = facts(own, **named)
    assert {key for key, value in facts(own, **named, **other).items() if value != base[key]} == {fact}
    (own / "copy.py").write_bytes((own / f"{file}.py").read_bytes().replace(b"\n", b"\r\n"))
    assert facts(own, **{setting: f"copy.py:{file.capitalize()}"}) == base
    (own / f"{file}.py").write_text((own / f"{file}.py").read_text() + "# edited\n")
    assert facts(own, **named)[code] != base[code]


WRONG = """
from diloco import Codec, OuterState
import torch

class Nothing:
    def __init__(self, *given, **more): pass

class Growing:
    def init(self, values): return OuterState()
    def update(self, mean, state, values):
        state.slots["more"] = mean.clone()
        values.sub_(mean)
        state.step += 1

class Halves(Codec):
    name = "halves"
    def payload_bytes(self, numel): return 2 * numel
    def _encode(self, values, payload): payload.copy_(values.half().view(torch.uint8))
    def _decode(self, payload, out): out.copy_(payload.clone().view(torch.float16))

class Loses:
    keeps_sent = False
    def merge(self, local, global_params, sent): local.zero_()

class Centres:
    keeps_sent = False
    def merge(self, local, global_params, sent): local.copy_(global_params - global_params.mean())

def broken(): raise KeyError("width")
def no_rate(params): return torch.optim.SGD(params)
"""


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sync__outer": "wrong.py:Nothing"}, r"sync\.outer=.*wrong\.py:Nothing can't be used: .* no method init"),
        ({"sync__outer": "wrong.py:Growing"}, "update added or removed slots of the state"),
        ({"sync__outer": "wrong.py:broken"}, "raised KeyError: 'width'"),
        ({"sync__outer": "signs.py:Signs", "sync__arguments__outer": {"momentun": 0.5}}, "did you mean 'momentum'"),
        ({"sync__outer": "nestorov"}, "did you mean 'nesterov'.* Name your own as module:Class"),
        ({"sync__arguments__outer": {"x": 1}}, r"has no parameter 'x'"),
        (
            {"sync__codec": "wrong.py:Nothing"},
            r"sync\.codec=.*wrong\.py:Nothing can't be used: .* which is no Codec of diloco",
        ),
        (
            {"sync__codec": "wrong.py:Halves"},
            "codec Halves: validate of the payload of 257 values .* raised CodecError: the halves .* contains NaN",
        ),
        ({"sync__codec": "not_there_at_all:Codec"}, "can't be imported: ModuleNotFoundError"),
        (
            {"sync__codec": "largest.py:Largest", "algorithm": "data-parallel"},
            "can't carry the gradients of algorithm='data-parallel'",
        ),
        ({"sync__merge": "wrong.py:Loses"}, "parameters move although"),
        ({"sync__merge": "wrong.py:Centres"}, "it merges parts of a fragment differently from the whole"),
        ({"sync__merge": "share.py:Share", "sync__merge_alpha": 0.5}, "which has no alpha"),
        ({"optimizer__name": "wrong.py:no_rate"}, "unexpected keyword argument 'lr'"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(own: Path, values: dict[str, Any], words: str) -> None:
    (own / "wrong.py").write_text(WRONG)
    with pytest.raises(ConfigurationError, match=words):
        plan_run(command_line(own / "run.toml", **values))


def test_a_module_in_the_working_directory_is_found_and_a_file_is_loaded_once_for_its_content(own: Path) -> None:
    assert find("sync.codec", "largest:Largest", Codec) is importlib.import_module("largest").Largest
    first = find("sync.codec", "largest.py:Largest", Codec)
    assert find("sync.codec", f"{own / 'largest.py'}:Largest", Codec) is first
    assert absolute("largest.py:Largest") == f"{own / 'largest.py'}:Largest"
    assert absolute("largest:Largest") == "largest:Largest"
    assert make_codec("largest.py:Largest", kept=3).parameters() == {"kept": 3}
    del sys.modules["largest"]


def test_a_function_may_take_the_whole_model(own: Path) -> None:
    (own / "whole.py").write_text(
        "from diloco import muon\ndef make(model, lr, **more): return muon(model, lr, **more)"
    )
    settings = load_configuration(
        ["run.toml", "--optimizer.name", "whole.py:make", "--optimizer.arguments", "{momentum=0.8}"]
    )
    model = outline(settings, 257).to_empty(device="cpu")
    groups = make_inner_optimizer(settings.optimizer, model).param_groups
    assert [group["momentum"] for group in groups if group["orthogonalise"]] == [0.8]


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("sympy:sympify", {"a": "__import__('pathlib').Path('ran').touch()"}),
        ("setuptools._distutils.spawn:spawn", {"cmd": ["touch", "ran"]}),
        ("IPython.utils.process:system", {"cmd": "touch ran"}),
    ],
)
@pytest.mark.parametrize("flag", ["--print-config", "--steps 1"])
def test_a_file_alone_does_not_run_what_somebody_else_has_installed(
    source: str,
    arguments: Mapping[str, Any],
    flag: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = "".join(f"{key} = {value!r}\n" for key, value in arguments.items())
    Path("run.toml").write_text(f'[model]\nsource = "{source}"\n[model.arguments]\n{tables}')
    assert f"add --model {source} to the command" in refused(["train", "run.toml", *flag.split()], capsys)
    Path("study.toml").write_text(f'[base]\nmodel.source = "{source}"\n[axes]\nseed = [0, 1]\n')
    assert "names code that does not lie beside it" in refused(["sweep", "study.toml", "--out", "studies"], capsys)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "run.toml", tmp_path / "study.toml"]


def test_a_file_may_name_code_that_lies_beside_it_and_the_user_any_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()
    for folder in ("mine", "theirs"):
        (tmp_path / folder / "shares.py").write_text(
            "from diloco import AlphaMerge\n\nhalf = lambda: AlphaMerge(0.5)\n"
        )
        (tmp_path / folder / "run.toml").write_text('[sync]\nmerge = "shares:half"\n')
    monkeypatch.chdir(tmp_path / "mine")
    assert main(["train", "run.toml", "--print-config"]) == 0
    capsys.readouterr()
    other = "../theirs/run.toml"  # a module is imported from the working directory
    assert "add --sync.merge shares:half to the command" in refused(["train", other, "--print-config"], capsys)
    assert main(["train", other, "--sync.merge", "shares:half", "--print-config"]) == 0
    capsys.readouterr()
    changed = refused(["train", other, "--sync.merge", "shares:whole", "--print-config"], capsys)
    assert "--sync.merge shares:whole is other code" in changed
