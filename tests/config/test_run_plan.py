"""The commands that a run prints for others and for later read back as the settings of the run."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from diloco.config import (
    command_text,
    compose,
    flatten,
    join_command,
    parse_arguments,
    plan_run,
    resume_command,
    told_settings,
)
from diloco.errors import ConfigurationError
from tests.command_lines import load_configuration
from tests.huggingface import write_config

PEER = "--out x --device cpu --secret-file s \
    --join /ip4/1/p2p/Qm --network.listen 0.0.0.0:7-8 --network.announce h:7 --monitor.console quiet \
    --checkpoint.keep 9 --train.global-device cpu"
RUNS = (
    "",
    "--algorithm diloco --codec int8 --inner-steps 7 --steps 40",
    "--preset tiny-muon --optimizer.arguments {momentum=0.5}",
    "--data-parallel-steps 50 --inner-steps 4",
    "--preset tiny-muon --sync.outer sgd --inner-steps 3",
    "--preset tiny-muon --optimizer.name AdamW --optimizer.clip-norm None --evaluation.sample-prompts '' 'a b' $c",
    "--seed 3 --outer-learning-rate 1 --optimizer.schedule wsd --network.straggler dynamic --steps 77",
    "--evaluation.sample-prompts=--debug --fragments 3 --overlap-steps 2 --merge-alpha 0.25",
    "--data 'my text.txt' $'\\nü' --model.arguments.width 64 --model.arguments.ffn-width 96 --replicas 3",
    "--data.packing masked --optimizer.name SGD --sync.outer sgd --sync.arguments.outer.final_ratio 0.5 "
    "--network.allow Qm1 Qm2 --network.silence 20s",
)


def shared(arguments: list[str]) -> dict[str, Any]:
    """Return the resolved settings that another machine takes over."""
    own = ("out", "checkpoint", "monitor", "network.listen", "network.announce", "network.join",
           "network.secret_file", "train.device", "train.global_device")  # fmt: skip
    values = flatten(plan_run(parse_arguments(arguments)).configuration)
    return {name: value for name, value in values.items() if not {name, name.partition(".")[0]} & {*own}}


@pytest.mark.parametrize("run", RUNS)
def test_an_invitation_reads_back_as_the_run_without_private_options(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = shlex.split(f"--transport swarm --run 'a $b' {run}")
    told = join_command(plan_run(parse_arguments(typed + PEER.split())).configuration, tmp_path)
    diloco, train, *arguments = shlex.split(told)
    assert (diloco, train) == ("diloco", "train")
    assert shared(arguments) == shared(typed)
    assert str(tmp_path) not in told
    assert len(arguments) <= len(typed) + 2


def test_no_service_elsewhere_gets_addresses_or_what_concerns_one_machine(tmp_path: Path) -> None:
    places = f"{PEER} --checkpoint.mirror {tmp_path}/mirror --monitor.prometheus 10.0.0.1:9464 --name my-pc"
    plan = plan_run(
        parse_arguments(shlex.split(f"--transport swarm --run r {places} --steps 77 --network.silence 20s"))
    )
    told = told_settings(plan.configuration)
    for place in ("/ip4/1", "0.0.0.0", "h:7", "10.0.0.1", str(tmp_path), "my-pc", "'s'"):
        assert place not in str(told), place
    assert (told["train"]["steps"], told["network"]["silence"], told["network"]["run"]) == (77, 20.0, "r")
    assert told["optimizer"]["name"] == plan.configuration.optimizer.name


VALUES: tuple[tuple[dict[str, object], dict[str, object]], ...] = (
    ({"--out": "-x"}, {"out": Path("-x")}),
    ({"--out": "a b\n'ü$"}, {"out": Path("a b\n'ü$")}),
    ({"--run": "--debug"}, {"network.run": "--debug"}),
    ({"--optimizer.clip-norm": None}, {"optimizer.clip_norm": None}),
    ({"--compile": False, "--data.local": True}, {"train.compile": False, "data.local": True}),
    ({"--evaluation.sample-prompts": ("-a", "", "b")}, {"evaluation.sample_prompts": ("-a", "", "b")}),
    ({"--evaluation.sample-prompts": ()}, {"evaluation.sample_prompts": ()}),
    ({"--optimizer.arguments": {"a b": (1, -2.5)}}, {"optimizer.arguments": {"a b": (1, -2.5)}}),
    ({"--seed": -3}, {"seed": -3}),
)


@pytest.mark.parametrize(("flags", "values"), VALUES)
def test_every_kind_of_value_reads_back(flags: dict[str, object], values: dict[str, object]) -> None:
    line = parse_arguments(shlex.split(command_text("train", "-run.toml", flags=flags))[2:])
    assert (line.file, line.values) == (Path("-run.toml"), values)


def test_folder_of_a_run_keeps_the_name_of_its_replica() -> None:
    swarm = ["--transport", "swarm", "--run", "a", "--name", "anna", "--join", "/ip4/10.0.0.1/tcp/1/p2p/QmOld"]
    record = plan_run(parse_arguments(swarm)).record
    assert 'name = "anna"' in record
    assert "QmOld" not in record


def test_a_resumed_run_names_what_its_folder_does_not_keep() -> None:
    rank = load_configuration(["--transport", "tcp", "--replica", "1", "--join", "10.0.0.1:29400"])
    command = "diloco train --resume runs/a --replica 1 --join 10.0.0.1:29400"
    assert resume_command(rank, Path("runs/a")) == command
    old = "/ip4/10.0.0.1/tcp/31330/p2p/QmOld"
    peer = load_configuration(["--transport", "swarm", "--run", "a", "--join", old, "--network.listen", "1:2"])
    alone = "diloco train --resume 'my run' --network.listen 1:2"
    assert resume_command(peer, Path("my run")) == alone
    assert resume_command(peer, Path("my run"), ["/p2p/QmNew"]) == f"{alone} --join /p2p/QmNew"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optimizer.arguments..a 3", "there is no flag --optimizer.arguments..a"),
        ("--warmup-steps 3", "there is no flag --warmup-steps; did you mean --optimizer.warmup-steps"),
        ("--no-streamin", "there is no flag --no-streamin; did you mean --data.no-streaming"),
        ("--compile=False", "takes no value, got False. Use --compile or --no-compile"),
        ("--compile no", "takes no value, got no. Use --compile or --no-compile"),
        ("--join a --run b --join", "--join needs a value"),
        ("--data '' a", "expected a value that is not empty"),
        ("--join=", "expected a value that is not empty"),
        ("--optimizer.arguments.betas [0.8,0.9", "[0.8,0.9 is not valid TOML"),
        ("--optimizer.arguments $'{a=1}\nb=2'", "is not valid TOML"),
        ("-- --help x", "too many arguments: x"),
    ],
)
def test_a_word_that_says_less_than_it_seems_to_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_arguments(shlex.split(words.replace("$'", "'").replace("\\n", "\n")))
    assert said in str(caught.value)


def test_an_entry_of_a_table_is_a_value_of_toml_or_a_text() -> None:
    words = ["1979-05-27", "x y", "[1, 'a b']", "{a = 1}", "true", "1e3", "'[INST]'", "-1", "1\nb = 2"]
    flags = [f"--optimizer.arguments.x{number}={word}" for number, word in enumerate(words)]
    values = compose(parse_arguments(flags)).optimizer.arguments
    entries = [values[f"x{number}"] for number in range(len(words))]
    assert entries == ["1979-05-27", "x y", (1, "a b"), {"a": 1}, True, 1000.0, "[INST]", -1, "1\nb = 2"]


def test_a_table_and_its_entries_are_merged_in_any_order() -> None:
    words = ["--optimizer.arguments.momentum=0.9", "--optimizer.arguments={nesterov = true}"]
    for flags in (words, words[::-1]):
        assert parse_arguments(flags).values == {"optimizer.arguments": {"momentum": 0.9, "nesterov": True}}


@pytest.mark.parametrize("value", ["none", "None", "NONE"])
def test_a_setting_is_taken_out_by_none_as_in_a_file(value: str) -> None:
    assert parse_arguments(["--fragments", value, "--optimizer.clip-norm", value]).values == {
        "sync.num_fragments": None,
        "optimizer.clip_norm": None,
    }
    assert parse_arguments(["--run", "none"]).values == {"network.run": "none"}


SHORT: dict[str, dict[str, object]] = {
    "Llama": {"max_position_embeddings": 40},
    "GPT-2": {"n_positions": 40},
    "Qwen3": {"max_position_embeddings": 40, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("preset", ["tiny", "finetune --data a.jsonl"])
def test_the_default_length_is_at_most_that_of_the_model(name: str, preset: str, tmp_path: Path) -> None:
    words = ["--preset", *preset.split(), "--model", f"hf:{write_config(tmp_path, name, **SHORT[name])}"]
    assert plan_run(parse_arguments(words)).configuration.train.sequence_length == 40
    assert plan_run(parse_arguments([*words, "--sequence-length", "30"])).configuration.train.sequence_length == 30
    for asked in (["--sequence-length", "41"], [str(write_file(tmp_path, "[train]\nsequence_length = 41\n"))]):
        with pytest.raises(ConfigurationError, match="sequence_length=41 exceeds the 40 tokens"):
            plan_run(parse_arguments([*asked, *words]))


def write_file(folder: Path, text: str) -> Path:
    (folder / "run.toml").write_text(text)
    return folder / "run.toml"


def test_the_default_length_is_that_of_the_preset_if_the_model_allows_it(tmp_path: Path) -> None:
    for longest, expected in ((64, 64), (4096, 128)):
        words = ["--model.arguments.max-sequence-length", str(longest)]
        assert plan_run(parse_arguments(words)).configuration.train.sequence_length == expected
        words = ["--model", f"hf:{write_config(tmp_path, 'Llama', max_position_embeddings=longest)}"]
        assert plan_run(parse_arguments(words)).configuration.train.sequence_length == expected
    (tmp_path / "mine.py").write_text("""
from torch import nn

class Mine(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.max_sequence_length, self.vocab_size = 33, vocab_size
        self.embedding, self.head = nn.Embedding(vocab_size, 4), nn.Linear(4, vocab_size)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))

def build(vocab_size):
    return Mine(vocab_size)
""")
    words = ["--model", f"{tmp_path / 'mine.py'}:build", "--fragments", "1"]
    assert plan_run(parse_arguments(words)).configuration.train.sequence_length == 33
