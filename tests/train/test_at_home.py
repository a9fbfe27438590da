"""`sync.arguments.average.at_home`: what each replica keeps to itself, in runs and in what is made of them."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.algorithm import named_parameters
from diloco.checkpoint import open_checkpoint
from diloco.cli import main
from diloco.errors import CheckpointError, ConfigurationError
from diloco.events import RunStarted
from diloco.train import agree_on_weights, describe, identity, make_fragments, outline
from diloco.trained import load_trained, read_weights
from diloco.transport import InProcessTransport, ReplicaGroup
from tests.finetuning import asked, write_base, write_records
from tests.processes import Processes, free_port
from tests.runs import Listener, settings_of, train
from tests.same import raw, same
from tests.train.ranks import Rank, Setup, largest_difference, load, open_group, save, unequal, whole
from tests.train.test_same_weights import net
from tests.train.test_state import rank
from tests.transport.wires import at_once

HEAD = "--sync.arguments.average.at-home lm_head"
WHOLE = f"{HEAD} --codec int8 --error-feedback 1"


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two replicas in one process."""
    out = tmp_path_factory.mktemp("at-home") / "run"
    train(data, out, WHOLE)
    return out


def head_of(run: Path, replica: int) -> torch.Tensor:
    return open_checkpoint(run).values(f"replica-{replica}-values")["model/lm_head.weight"]


def test_each_replica_has_a_head_of_its_own_and_the_global_parameters_have_none(run: Path) -> None:
    checkpoint = open_checkpoint(run)
    assert "lm_head.weight" not in checkpoint.values("global")
    assert not [name for name in checkpoint.values("outer") if "lm_head" in name]
    assert not torch.equal(head_of(run, 0), head_of(run, 1))
    for fragment in checkpoint.fact("fragments", list):
        assert "lm_head.weight" not in fragment["parameters"]


def test_what_is_made_of_a_checkpoint_has_the_head_of_its_replica_and_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = "global parameters, with replica 0's lm_head.weight"
    trained = load_trained(run)
    assert trained.weights == says
    assert raw(named_parameters(trained.model)["lm_head.weight"].detach()) == raw(head_of(run, 0))
    assert raw(read_weights(run)["lm_head.weight"]) == raw(head_of(run, 0)), "what --init-from begins with"
    embedding = named_parameters(trained.model)["model.embed_tokens.weight"].detach()
    assert raw(embedding) == raw(open_checkpoint(run).values("global")["model.embed_tokens.weight"])
    for command in (f"evaluate {run}", f"export {run} --out {tmp_path}/out"):
        assert main(command.split()) == 0, command
        assert says in "".join(capsys.readouterr()), command
    assert main(["evaluate", str(run), "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["heldout_loss"]
    assert loss == pytest.approx(json.loads((run / "summary.json").read_text())["heldout_loss"], rel=1e-5)
    assert json.loads((tmp_path / "out" / "diloco.json").read_text())["weights"] == says


@pytest.mark.parametrize("stop", [2, 6, 7])
def test_stopped_anywhere_and_resumed_it_is_as_if_it_had_never_stopped(
    stop: int, run: Path, data: Path, tmp_path: Path
) -> None:
    """Also with rounds in flight."""
    train(data, tmp_path / "run", f"{WHOLE} --stop-after {stop}")
    train(data, tmp_path / "run", f"{WHOLE} --resume {tmp_path / 'run'}")
    whole, again = open_checkpoint(run), open_checkpoint(tmp_path / "run")
    for part in ("global", "outer", "replica-0-values", "replica-1-values"):
        assert same(whole.load(part), again.load(part)), part


def test_replicas_that_move_to_processes_of_their_own_take_their_heads_with_them(
    run: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(data, out, f"{WHOLE} --stop-after 6")
    with Processes() as processes:
        processes.start(2, rank, "tcp", f"--resume {out} --transport tcp --stop-after 12", free_port())
        assert set(processes.results(timeout_s=300).values()) == {0}
    for number, folder in enumerate((out, out / "replica-1")):
        assert raw(open_checkpoint(folder).values(f"replica-{number}-values")["model/lm_head.weight"]) == raw(
            head_of(run, number)
        )
        words = f"global parameters, with replica {number}'s lm_head.weight"
        assert load_trained(folder).weights == words
    digests = {json.loads((each / "summary.json").read_text())["global_params_digest"] for each in (run, out)}
    assert len(digests) == 1


@pytest.mark.parametrize("words", ["", "--sync.arguments.average.at-home norm"])
def test_a_run_goes_on_only_with_the_same_at_home(words: str, run: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has at home = lm_head.weight and this run has at home = (none|.*norm)"):
        train(data, tmp_path / "on", f"{words} --codec int8 --error-feedback 1 --resume {run}")
    assert not (tmp_path / "on").exists()


def test_the_command_that_goes_on_refuses_another_at_home(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "--sync.arguments.average.at-home norm"
    assert main(f"train --resume {run} {other} --steps 13 --out {tmp_path} --monitor.console quiet".split()) == 2
    assert "sync.arguments" in capsys.readouterr().err


def test_a_run_says_at_the_start_what_stays_at_home_and_its_plan_counts_fewer_bytes(data: Path, tmp_path: Path) -> None:
    told = Listener()
    train(data, tmp_path / "run", f"{HEAD} --steps 2", sink=told)
    (started,) = told.of(RunStarted)
    assert started.facts["at home"] == "lm_head.weight: each replica keeps its own"
    sizes = []
    for words in ("", HEAD):
        settings = settings_of(data, words)
        model = outline(settings, 257)
        sizes.append([fragment.numel for fragment in make_fragments(settings.sync, model)])
        assert ("at home" in describe(settings, model)) == bool(words)
    head = outline(settings_of(data), 257).lm_head
    assert isinstance(head, torch.nn.Linear)
    assert sum(sizes[0]) - sum(sizes[1]) == head.weight.numel() == 257 * 16


def test_a_plan_for_a_number_of_parameters_has_no_names_to_keep_at_home(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan --parameters 1B --bandwidth 100Mbit {HEAD}".split()) == 2
    assert "at_home names parameters of a model, of which --parameters only gives the number" in capsys.readouterr().err


def test_before_the_first_step_replicas_agree_on_all_but_what_stays_at_home() -> None:
    hub = InProcessTransport(2)
    models = [net(seed) for seed in range(2)]
    before = [copy.deepcopy(model.state_dict()) for model in models]
    names = [name for name in before[0] if name.startswith("1.")]
    assert names
    at_once(
        [
            lambda m=m: agree_on_weights(
                models[m], torch.optim.SGD(models[m].parameters()), hub.endpoint(m), ReplicaGroup(replica=m), 0, names
            )
            for m in range(2)
        ]
    )
    for model, own in zip(models, before, strict=True):
        for name, value in model.state_dict().items():
            assert raw(value) == raw((own if name in names else before[0])[name]), name


def test_replicas_compare_what_stays_at_home(data: Path) -> None:
    facts = []
    for words in ("", HEAD):
        settings = settings_of(data, words)
        facts.append(identity(settings, outline(settings, 257))["at home"])
    assert facts == ["none", "lm_head.weight"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sync.arguments.average.at-home lmhead", "'lmhead' can't stay at home, .* did you mean 'lm_head'?"),
        (f"{HEAD} --model.arguments.tie-embeddings true", "'lm_head' can't stay at home, .* A tied output projection"),
        (f"{HEAD} --algorithm data-parallel", r"at_home=\('lm_head',\) can't be used with algorithm='data-parallel'"),
        ("--sync.arguments.average.at-home [3]", r"at_home must be a list of texts such as \['lm_head'\], got \(3,\)"),
        ("--sync.arguments.average.at-home {a=1}", "at_home must be a list of texts"),
        ("--sync.arguments.average.at-home ['model','lm_head']", "leaves nothing to synchronise"),
        (
            f"{HEAD} --data-parallel-steps 3",
            "can't be used with train.data_parallel_steps=3: .* --data-parallel-steps 0",
        ),
    ],
)
def test_what_can_not_stay_at_home_is_refused_before_anything_is_written(
    words: str, said: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        train(data, tmp_path / "run", words)
    assert not (tmp_path / "run").exists()


def test_adapters_at_home_are_kept_apart_and_an_export_has_those_of_its_replica(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", marked=False, hidden_size=32, intermediate_size=48)
    records = [{**asked(word, word[::-1]), "copy": copy} for copy in range(10) for word in ("red?", "blue?")]
    data, out = write_records(tmp_path / "data.jsonl", records), tmp_path / "run"
    words = f"""finetune {base} --data {data} --out {out} --replicas 2 --lora-rank 4 --steps 10 --inner-steps 5
        --learning-rate 1e-2 --batch-size 2 --sequence-length 96 --monitor.console quiet --evaluation.every-steps 0
        --checkpoint.every-steps 0 --device cpu --sync.arguments.average.at-home lora_B"""
    assert main(words.split()) == 0
    checkpoint = open_checkpoint(out)
    one, other = (checkpoint.values(f"replica-{number}-values") for number in range(2))
    kept = [name for name in one if ".lora_B." in name]
    assert kept
    assert not [name for name in checkpoint.values("global") if ".lora_B." in name]
    assert not any(torch.equal(one[name], other[name]) for name in kept)
    assert main(f"export {out} --out {tmp_path / 'adapter'} --to adapter".split()) == 0
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {raw(value) for name, value in exported.items() if ".lora_B." in name} == {raw(one[name]) for name in kept}
    about = json.loads((tmp_path / "adapter" / "diloco.json").read_text())["weights"]
    named = r"(\S+lora_B\S+, ){2}\S+lora_B\S+ and 18 more"
    assert re.fullmatch(rf"global parameters, with replica 0's {named}", about), about


def trained_by_ranks(position: int, setup: Setup, folder: Path) -> dict[str, Any]:
    """Train, save, and go on from what was saved; return all values, those of the replica alone, and what differs."""
    group = open_group(setup, position, folder)
    ranks = Rank(setup, group)
    ranks.train(10)
    checkpoint = open_checkpoint(save(ranks, folder / f"checkpoints-{setup.strategy}"))
    rest = {name: whole(value).clone() for name, value in ranks.state.rest_of_model().items()}
    ranks.train(4)
    again = Rank(setup, group)
    load(again, checkpoint)
    again.train(4)
    values = ranks.values()
    return {"values": values, "rest": rest, "differing": unequal(values, again.values())}


def test_ranks_that_shard_a_replica_train_its_own_head_together(tmp_path: Path) -> None:
    """It is saved whole, beside the global parameters, and comes back in shards."""
    setup = Setup(strategy="fsdp", size=2, at_home=("lm_head",))
    with Processes() as processes:
        processes.start(2, trained_by_ranks, setup, tmp_path)
        ranks = processes.results(timeout_s=300)
    alone = trained_by_ranks(0, replace(setup, strategy="none", size=1), tmp_path)
    for each in (*ranks.values(), alone):
        assert each["differing"] == []
        assert {*each["rest"]} == {"lm_head.weight"}
        assert "global/lm_head.weight" not in each["values"]
        assert "inner/exp_avg/lm_head.weight" in each["values"]
        assert largest_difference(each["values"], alone["values"]) < 1e-5
        assert largest_difference(each["rest"], alone["rest"]) < 1e-5
