"""`data.local`: each replica has data of its own, and the others learn nothing of it but counts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha512
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from diloco.checkpoint import open_checkpoint
from diloco.cli import main
from diloco.config import join_command, parse_arguments, plan_run, to_toml
from diloco.events import Note, RunStarted, SampleGenerated, Site, StepFinished, mean_loss
from diloco.monitor import read_metrics
from diloco.train import compared, identity, notes, outline, run_training
from diloco.transport import MeetingPlace, PeerStatus
from tests.commands import PACE, Command
from tests.processes import Processes, free_port
from tests.runs import SMALL, Listener, of_torchrun, settings_of, write_text
from tests.same import raw


class Sites:
    """Sites, each with a folder of its own text, which start a replica each by a command of their own."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self.processes, self.folder, self.commands = processes, folder, 0
        self.watched = False  # whether all that is sent is written to files
        self.data = []
        for site, documents in enumerate((40, 10, 20)):
            (place := folder / f"text-{site}").mkdir()
            self.data.append(write_text(place, documents=documents, seed=site))

    def start(self, site: int, out: Path, arguments: str, **environment: Any) -> Command:
        words = f"train {SMALL} {self.data[site]} --data.local --monitor.console quiet --out {out} {arguments}"
        return self.command(words, **environment)

    def command(self, words: str, **environment: Any) -> Command:
        self.commands += 1
        if self.watched:
            sent = str(self.folder / f"{self.commands}.sent")
            environment |= {"module": "tests.train.watching", "environment": {"SENT": sent}}
        return Command(self.processes, shlex.split(words), self.folder / f"{self.commands}.txt", **environment)


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    with Processes() as processes:
        yield Sites(processes, tmp_path)


Run = Callable[..., list[Path]]

BPE = "--tokenizer bpe:270"
"""The text of each site would give other tokens."""


def ended(commands: Sequence[Command]) -> None:
    for command in commands:
        command.end()


def over_tcp(sites: Sites, name: str, arguments: str) -> list[Path]:
    """Return the folders of the two sites, which lie beside each other."""
    out, meet = sites.folder / name, f"--transport tcp --join 127.0.0.1:{free_port()} {arguments}"
    ended([sites.start(site, out, f"{meet} --replica {site}") for site in range(2)])
    return [out, out / "replica-1"]


def in_process_groups(sites: Sites, name: str, arguments: str) -> list[Path]:
    out, store = sites.folder / name, TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [of_torchrun(site, 2, store.port) for site in range(2)]
    ended([sites.start(site, out, f"--transport torch {arguments}", environment=places[site]) for site in range(2)])
    return [out, out / "replica-1"]


def over_a_swarm(sites: Sites, name: str, arguments: str) -> list[Path]:
    swarm = f"--transport swarm --run {name} --network.listen 127.0.0.1:0 {arguments}"
    outs = [sites.folder / f"{name}-{site}" for site in range(2)]
    first = sites.start(0, outs[0], f"{swarm} --replica 0")
    address = first.until(lambda: re.search(r"--join (/ip4/127\S+)", first.output), "an address")[1]
    ended([first, sites.start(1, outs[1], f"{swarm} --replica 1 --join {address}")])
    return outs


def summaries(folders: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads((folder / "summary.json").read_text()) for folder in folders]


SHOWN = f"{BPE} --data-parallel-steps 2 --evaluation.every-steps 4"


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of the two sites of a run over TCP."""
    with Processes() as processes:
        return over_tcp(Sites(processes, tmp_path_factory.mktemp("fixed")), "tcp", SHOWN)


@pytest.mark.parametrize("run", [in_process_groups, over_a_swarm])
def test_a_run_with_own_data_has_the_same_bits_on_every_transport(run: Run, fixed: list[Path], sites: Sites) -> None:
    """Also the tokenizer of the founder, and what each site shows of the global parameters on the data of all."""
    folders = run(sites, "other", SHOWN)
    for name in ("global_params_digest", "sites", "sites_loss"):
        assert [end[name] for end in summaries(folders)] == [end[name] for end in summaries(fixed)], name
    assert len({(folder / "tokenizer.json").read_text() for folder in (*fixed, *folders)}) == 1
    for folder in folders:
        assert [each["step"] for each in read_metrics(folder / "metrics.jsonl", "Evaluated")] == [4, 8, 12]


def test_each_site_sees_the_global_parameters_on_the_data_of_all_and_its_own_beside(fixed: list[Path]) -> None:
    ends = summaries(fixed)
    assert len({end["global_params_digest"] for end in ends}) == 1
    assert [end["steps"] for end in ends] == [12, 12]
    table = {number: Site(*site) for number, site in ends[0]["sites"].items()}
    assert [(site.step, site.tokens) for site in table.values()] == [(12, 12 * 2 * 16)] * 2
    assert table["0"].passes < table["1"].passes, "each counts passes over its own data, of which one has little"
    for number, end in enumerate(ends):
        assert end["sites"] == ends[0]["sites"]
        assert end["heldout_loss"] == table[str(number)].loss
        assert end["sites_loss"] == mean_loss(table)
        assert end["local_loss"] != end["heldout_loss"]
    assert main(["evaluate", str(fixed[1])]) == 0


HEAD = "--sync.arguments.average.at-home lm_head"


def head_of(run: Path, site: int) -> bytes:
    head = open_checkpoint(run).values(f"replica-{site}-values")["model/lm_head.weight"]
    return raw(head)


def test_sites_that_stream_and_keep_their_heads_may_join_a_swarm_and_have_the_bits_of_a_fixed_run(sites: Sites) -> None:
    """Over each transport, the head of a site is its own and the same, and all else is that of all sites."""
    whole = f"--data.streaming --fragments 1 --overlap-steps 0 --evaluation.every-steps 4 {HEAD}"
    folders = [run(sites, run.__name__, whole) for run in (over_tcp, in_process_groups, over_a_swarm)]
    ends = [end for of_run in folders for end in summaries(of_run)]
    assert len({end["global_params_digest"] for end in ends}) == 1
    for end in ends:
        assert end["local_loss"] != end["heldout_loss"], "the local parameters of before the merge at the last step"
        assert end["sites"] == ends[0]["sites"], "each with its own head"
    heads = [[head_of(folder, site) for site, folder in enumerate(of_run)] for of_run in folders]
    assert heads == heads[:1] * len(heads)
    assert heads[0][0] != heads[0][1]


def test_sites_that_stop_and_go_on_each_in_its_own_data_end_as_those_that_never_stop(sites: Sites) -> None:
    """Each command finds the data of its replica in the folder that they share, and other data is refused by name."""
    whole = summaries(over_tcp(sites, "whole", BPE))
    out = over_tcp(sites, "cut", f"{BPE} --stop-after 6")[0]
    resume = f"train --resume {out} --monitor.console quiet --join 127.0.0.1:{free_port()} --replica"
    swapped = sites.command(f"{resume} 1 --data {sites.data[0]}")
    first = sites.command(f"{resume} 0")
    swapped.end(1)
    said = r"has data = text.jsonl \(.* 1879 bytes, .*\) and this run has data = text.jsonl \(.* 7548 bytes"
    assert re.search(said, swapped.output), swapped.output
    first.end(1)
    ended([sites.command(f"{resume} {site}") for site in range(2)])
    assert [end["global_params_digest"] for end in summaries([out, out / "replica-1"])] == [
        end["global_params_digest"] for end in whole
    ]


def test_a_replica_that_repeats_its_data_too_often_says_so_once_also_if_it_goes_on(tmp_path: Path) -> None:
    """Alone in one process, which the command refuses, as it means nothing there."""
    settings = settings_of(write_text(tmp_path, documents=2), "--replicas 1 --steps 60 --network.transport in-process")
    settings = replace(settings, data=replace(settings.data, local=True))
    told = Listener()
    for steps in ("first", "again"):
        if steps == "again":
            settings = replace(settings, checkpoint=replace(settings.checkpoint, resume=str(tmp_path / "run")))
        stop = replace(settings.train, stop_after=40 if steps == "first" else None)
        run = replace(settings, train=stop)
        summary = run_training(run, folder=tmp_path / "run", sink=told, config_toml=to_toml(run))
    (note,) = [each for each in told.of(Note) if "has read all of its own data 4 times" in each.text]
    passes = {event.step: event.epoch for event in told.of(StepFinished)}
    assert (passes[note.step - 1], passes[note.step]) == (4, 5)
    assert summary["epochs"] > 5


def test_who_watches_a_swarm_is_told_neither_a_sample_nor_what_the_data_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (clinic := tmp_path / "clinic").mkdir()
    data = write_text(clinic)
    words = "--replicas 1 --network.transport in-process --evaluation.every-steps 4 --evaluation.sample-prompts alpha"
    settings = settings_of(data, words)
    told, watched = Listener(), PeerStatus()
    monkeypatch.setattr(MeetingPlace, "publish", lambda place, event: watched.add(event))
    for local in (False, True):
        run = replace(settings, data=replace(settings.data, local=local))
        run_training(run, folder=tmp_path / f"run-{local}", sink=told, config_toml=to_toml(run))
        answer = b"".join(watched.since(0)["events"])
        assert (b"SampleGenerated" in answer) != local
        assert b"StepFinished" in answer
        watched = PeerStatus()
    assert len(told.of(SampleGenerated)) == 2, "which only this machine shows"
    start = told.of(RunStarted)[-1]
    for text in ("clinic", str(tmp_path), "text.jsonl", start.facts["data"], start.details["data"]):
        assert text.encode() not in answer, text


@pytest.mark.parametrize("run", [over_tcp, over_a_swarm])
def test_nothing_of_the_data_leaves_the_machine_but_the_four_figures_that_the_page_lists(
    run: Run, sites: Sites
) -> None:
    """Neither a piece of text nor the name of a file or folder, nor how much data there is, nor what stays at home."""
    texts: list[str] = []
    for site in range(2):
        clinic = sites.data[site] = sites.folder / f"clinic-{site}"
        clinic.mkdir()
        texts += (documents := [f"{site} {sha512(bytes([site, n])).hexdigest()}" for n in range(25 + site)])
        (clinic / "ward-seven.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    sites.watched = True
    folders = run(sites, "seen", f"--evaluation.every-steps 4 --codec float32 {HEAD}")
    sent = b"".join(file.read_bytes() for file in sites.folder.glob("*.sent"))
    assert b"data.local" in sent, "what the replicas compare is there to read"
    assert sent.count(b"site") >= 6, "and what each tells of three evaluations"
    for text in texts:
        assert not [n for n in range(0, len(text) - 8, 4) if text[n : n + 8].encode() in sent]
    files = open_checkpoint(folders[0]).fact("files", str).split()
    for name in ("clinic", "ward", "jsonl", str(sites.folder), *files):
        assert name.encode() not in sent, name
    for site, folder in enumerate(folders):
        (start,) = read_metrics(folder / "metrics.jsonl", "RunStarted")
        for fact in (start["facts"]["data"], start["facts"]["held out"], start["details"]["data"]):
            assert fact.encode() not in sent, fact
        head = head_of(folder, site)
        assert not [n for n in range(0, len(head), 64) if head[n : n + 8] in sent]
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    listed = re.search(r"\*\*What leaves the machine\*\*.*?\n- ", page, re.S)
    assert listed
    assert [name for name in Site._fields if f"`{name}`" not in listed[0]] == []
    assert "training loss, gradient norm and pass" in " ".join(listed[0].split()), "what `PeerStatus` tells of a step"


def test_folders_of_tokens_and_given_weights_are_those_of_text_and_of_the_page(sites: Sites) -> None:
    """The mean weighs a site as it says; the bits are those of a run on the text itself."""
    digests = set()
    for name in ("text", "tokens"):
        if name == "tokens":
            for site in range(2):
                folder = sites.folder / f"tokens-{site}"
                assert main(f"tokenize --data {sites.data[site]} --tokenizer bytes --out {folder}".split()) == 0
                sites.data[site] = folder
        out, meet = sites.folder / name, f"--transport tcp --join 127.0.0.1:{free_port()}"
        weight = "--sync.arguments.average.weight"
        ended([sites.start(site, out, f"{meet} --replica {site} {weight} {3 - 2 * site}") for site in range(2)])
        for site, folder in enumerate((out, out / "replica-1")):
            rounds = read_metrics(folder / "metrics.jsonl", "RoundCommitted")
            assert {(each["weight"], each["total_weight"]) for each in rounds} == {(3 - 2 * site, 4)}
        digests |= {end["global_params_digest"] for end in summaries([out, out / "replica-1"])}
    assert len(digests) == 1


def test_a_killed_site_comes_back_to_its_own_data_and_its_share_is_named_meanwhile(
    sites: Sites,
) -> None:
    (sites.folder / "pace.py").write_text(PACE)
    swarm = "--transport swarm --run kills --network.listen 127.0.0.1:0 --network.silence 5s --replicas 1"
    swarm += f" {BPE} --steps 100000 --evaluation.every-steps 4 --sinks {sites.folder / 'pace.py'}:Pace"
    outs = [sites.folder / name for name in ("first", "second", "third")]

    def told(site: int, event: str) -> list[dict[str, Any]]:
        path = outs[site] / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for line in lines if line.endswith("}") and (record := json.loads(line))["event"] == event]

    first = sites.start(0, outs[0], f"{swarm} --replica 0")
    address = first.until(lambda: re.search(r"--join (/ip4/127\S+)", first.output), "an address")[1]
    second = sites.start(1, outs[1], f"{swarm} --replica 1 --join {address} --checkpoint.every-steps 8")
    second.until(lambda: len(told(1, "CheckpointSaved")) > 1, "two checkpoints")
    sites.processes.kill(second.rank)
    drawn = open_checkpoint(outs[1]).load("replica-1")["sampler"]["drawn"]
    lost = first.until(lambda: [n["text"] for n in told(0, "Note") if "Nobody else has" in n["text"]], "a note")[0]
    share = re.fullmatch(
        r"Nobody else has the data of replica 1, (\d+) % of the tokens.*: the run goes on without it\.", lost
    )
    assert share, lost
    assert 0 < int(share[1]) < 100
    third = sites.start(2, outs[2], f"{swarm} --replica 2 --join {address}")
    pace = f"--sinks {sites.folder / 'pace.py'}:Pace"
    resume = f"train --resume {outs[1]} --monitor.console quiet {pace} --join {address} --network.listen 127.0.0.1:0"
    resumed = sites.command(resume)
    again = len(told(1, "Evaluated"))
    resumed.until(lambda: len(told(1, "Evaluated")) > again, "an evaluation")
    assert told(1, "Evaluated")[again]["sites"]["1"][2] > drawn * 2 * 16, "tokens of all of its data so far"
    together = first.until(lambda: [e for e in told(0, "Evaluated") if len(e["sites"]) == 3], "a table of all three")[0]
    assert {*together["sites"]} == {"0", "1", "2"}
    assert third.poll() is None


@pytest.mark.parametrize(
    ("words", "told"),
    [("--data.local --inner-steps 31", 1), ("--data.local --inner-steps 30", 0), ("--inner-steps 99", 0)],
)
def test_a_run_with_own_data_is_told_of_rounds_that_are_too_long_for_it(words: str, told: int, data: Path) -> None:
    settings = settings_of(data, f"--transport tcp --steps 4000 {words}")
    assert len([note for note in notes(settings) if "Prefer shorter ones" in note]) == told


def test_who_shares_data_is_refused_by_those_who_have_their_own(sites: Sites) -> None:
    meet = f"--transport tcp --join 127.0.0.1:{free_port()}"
    sites.start(0, sites.folder / "own", f"{meet} --replica 0")
    out = sites.folder / "shared"
    shared = sites.command(f"train {SMALL} {sites.data[1]} --monitor.console quiet --out {out} {meet} --replica 1")
    shared.end(1)
    assert re.search(r"has data.local = yes .* has data.local = no", shared.output), shared.output


def test_replicas_with_own_data_compare_tokenizer_template_and_format_and_nothing_of_the_data(data: Path) -> None:
    settings = settings_of(data, "--data.local --transport tcp")
    facts = identity(
        settings, outline(settings, 257), "digest of the data", "", {"tokenizer": "t", "chat template": "c"}
    )
    assert facts["data"] == "digest of the data"
    told = compared(settings, facts)
    assert {"tokenizer", "chat template", "documents", "data.local"} <= told.keys()
    assert "digest of the data" not in told.values()
    assert not [value for value in told.values() if str(data.name) in value or str(data.parent) in value]
    shared = settings_of(data, "--transport tcp")
    assert compared(shared, facts) == facts


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --data.local", "data.local=True can't be used with network.transport='in-process'"),
        ("train --data.local --transport tcp", "Start each by itself: --data FOLDER --replica 0, 1, ..."),
    ],
)
def test_replicas_that_would_all_have_the_same_own_data_are_refused(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_join_command_asks_for_own_data_and_names_none(tmp_path: Path) -> None:
    words = ["--transport", "swarm", "--run", "a", "--data", str(tmp_path / "patients"), "--data.local"]
    told = join_command(plan_run(parse_arguments(words)).configuration, tmp_path)
    assert "--data.local" in told
    assert "patients" not in told
