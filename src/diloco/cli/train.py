"""``diloco train`` and ``diloco finetune``, which is `diloco train` with the preset for conversations.

They plan the run, choose its folder, and train: all replicas here, one rank, or a peer of a swarm.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from diloco.algorithm import check_number
from diloco.checkpoint import one_at_a_time
from diloco.cli import DONE, FAILED, INTERRUPTED
from diloco.cli.folders import (
    check_named,
    claim_numbered,
    claimed,
    ended_early,
    has_checkpoints,
    has_record,
    not_empty,
)
from diloco.config import (
    CONFIG_FILE,
    CommandLine,
    Configuration,
    RunPlan,
    asked_values,
    check_fetched,
    chosen_places,
    compose,
    compose_for_model,
    flatten,
    join_command,
    keys_of,
    parse_arguments,
    parse_flags,
    plan_run,
    preset_values,
    read_record,
    record_of,
    resume_command,
    told_settings,
)
from diloco.errors import DEBUG, ConfigurationError, NoCheckpointError
from diloco.plugins import is_own
from diloco.train import LAUNCHED, Role, read_torchrun, role_of
from diloco.traits import Trait
from diloco.waiting import log_to_stderr, say

if TYPE_CHECKING:
    from diloco.data import Corpus
    from diloco.train import Fleet


def run_train(arguments: Sequence[str]) -> int:
    """Train; return 130 if a signal stopped the run and its state was saved."""
    return run_line(with_torchrun(with_beginning(parse_arguments(arguments))), ["train", *arguments])


def with_beginning(line: CommandLine) -> CommandLine:
    """Return the line with ``--resume FOLDER``, or without it, in place of --resume-or-start and of a URL to resume.

    What is at a URL is fetched into --out, or into a folder in runs/ that is named like the last part of the URL.
    """
    values, resume = dict(line.values), line.values.get("checkpoint.resume")
    if resume is not None and line.resume_or_start is not None:
        raise ConfigurationError("--resume and --resume-or-start were both given. Leave one of them out.")
    place = str(line.resume_or_start or resume or "")
    folder, remote = Path(place), "://" in place
    if not remote and line.resume_or_start is None:
        return line if resume is None else _begun_again(line, folder)
    if remote:
        name = place.rstrip("/").rpartition("/")[2]
        if name in ("", ".", "..") and "out" not in values:
            raise ConfigurationError(f"{place} has no name for a run folder. Choose one with --out.")
        folder = values.setdefault("out", Path("runs", name))
    # without what diloco finetune derives settings of a new run from
    known = {name: value for name, value in values.items() if name in keys_of(Configuration)}
    if remote:
        if line.resume_or_start is not None:
            values |= {"checkpoint.mirror": place}
            known |= {"checkpoint.mirror": place}
            model = {"model.source": f"hf:{values['folder']}"} if "folder" in values else {}  # diloco finetune
            known |= chosen_places(dataclasses.replace(line, values=model | known))
        _fetch(place, folder, known, must=line.resume_or_start is None)
    if has_checkpoints(folder):
        values = known | {"checkpoint.resume": str(folder)}
        return dataclasses.replace(line, file=None if line.resume_or_start else line.file, values=values)
    if values.setdefault("out", folder) != folder:
        two = f"--out {values['out']} and --resume-or-start {folder} name two run folders"
        raise ConfigurationError(f"{two}. Drop --out.")
    return dataclasses.replace(line, values=values)


def _begun_again(line: CommandLine, folder: Path) -> CommandLine:
    """Return a line with ``--resume FOLDER`` as it is, or if that run ended before its first checkpoint, as a new run.

    The new run has the settings in the folder, or where the run ended before it had written them, those of the line.
    """
    recorded = has_record(folder)
    if not ended_early(folder) or (recorded and line.file is not None):
        return line
    values = {name: value for name, value in line.values.items() if name != "checkpoint.resume"}
    keys, file, whose = keys_of(Configuration), line.file, "this command"
    if recorded:
        file = record_of(folder, values.get("network.replica"))[1]
        whose = str(file)
    elif file is None and not any(Trait.OF_PROCESS not in keys[name].traits for name in values if name in keys):
        raise ConfigurationError(
            f"--resume {folder}: the run there has ended before it had saved anything, its settings included. Begin it "
            f"again with the command that began it, and --out {folder}."
        )
    torchrun = read_torchrun(os.environ)
    if LAUNCHED not in os.environ and (torchrun is None or torchrun.rank == 0):
        say(f"the run in {folder} has ended before its first checkpoint, so it begins again, as {whose} says")
    values.setdefault("out", folder)
    return dataclasses.replace(line, file=file, values=values, resume_or_start=str(folder))


def _fetch(url: str, folder: Path, values: Mapping[str, Any], *, must: bool) -> None:
    from diloco.checkpoint import fetch_run

    if LAUNCHED in os.environ:  # the launcher has done it
        return
    path = folder / CONFIG_FILE
    if path.exists() and (there := read_record(path).checkpoint.mirror) != url:
        raise ConfigurationError(f"{folder} has a run whose checkpoint.mirror is {there!r}. Choose another --out.")
    with one_at_a_time(folder.parent):  # of the ranks on this machine, the first fetches, and the others find it there
        replica = values.get("network.replica")
        torchrun = read_torchrun(os.environ)
        tell = say if torchrun is None or torchrun.local_rank == 0 else lambda sentence: None
        found = fetch_run(url, folder, replica, lambda settings: check_fetched(url, settings, values), tell)
    if must and not found:
        raise NoCheckpointError(f"{url} has no checkpoint. Nothing was fetched.")


def with_torchrun(line: CommandLine) -> CommandLine:
    """Return the line with the defaults of ``torchrun``: --transport torch, and as many replicas as it started.

    With --replica or --join it has started the ranks of one replica of a run over TCP, whose --replicas are the user's.
    """
    torchrun = read_torchrun(os.environ)
    if torchrun is None or "checkpoint.resume" in line.values:
        return line
    asked = asked_values(line)
    transport = "tcp" if {"network.replica", "network.join"} & asked.keys() else "torch"
    if asked.get("network.transport", transport) not in ("torch", "tcp"):
        return line
    replicas = torchrun.world_size // asked.get("network.replica_size", 1)
    together = transport == "torch" and replicas > 0  # else the number of processes is refused later
    defaults = {"network.transport": transport} | ({"network.replicas": replicas} if together else {})
    return dataclasses.replace(line, defaults=defaults)


FINETUNE_DESCRIPTION = """Fine-tune a transformers model on conversations, with DiLoCo between replicas.

By default only adapters (LoRA) are trained and exchanged; --lora-rank 0 trains all
weights. --help-all shows all flags, which are those of `diloco train`, with the defaults of this command.

Examples:
  diloco finetune llama --data chat.jsonl              on this machine alone
  diloco finetune llama --data chat.jsonl --transport swarm --run mine
                                                       with others; prints how to join
  diloco finetune llama --data chat.jsonl --lora-rank 0  all weights
  diloco finetune --resume runs/mine                   continue a stopped run

`diloco generate RUN --chat` chats with the model, `diloco export RUN --out PATH --merge`
writes it as a whole model, and with `--to adapter` an adapter for peft."""

COMMON = (
    *("data.paths", "epochs", "model.lora_rank", "model.quantization", "optimizer.learning_rate"),
    *("train.steps", "train.batch_size", "train.sequence_length", "train.precision", "data.format"),
    *("network.replicas", "network.transport", "network.run", "network.join", "out", "checkpoint.resume"),
)
"""The settings that --help shows."""

SHOWN = {
    "preset": None,
    "data.tokenizer": "that of the model",
    "optimizer.learning_rate": "0.0002, or 2e-05 with --lora-rank 0",
    "train.steps": "from --epochs and the data",
    "train.batch_size": "8, or fewer if there are fewer rows",
    "sync.inner_steps": "a tenth of the steps, at most 20",
    "sync.outer": "nesterov, or sgd with fewer than 50 rounds",
}
"""The defaults that follow from the data and the model, as the help shows them."""


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(Configuration):
    """The settings of a run, its model, and from what its number of steps is derived."""

    folder: Annotated[Positional[Path | None], arg(metavar="MODEL")] = None
    """Folder of a transformers model."""
    epochs: float = 3.0
    """Number of passes over all conversations. Use this or --steps."""


def run_finetune(arguments: Sequence[str]) -> int:
    """Fine-tune; return 130 if a signal stopped the run and its state was saved."""
    shown = flatten(FinetuneSettings()) | preset_values("finetune") | SHOWN
    line = parse_flags(FinetuneSettings, "finetune", FINETUNE_DESCRIPTION, arguments, shown=shown, common=COMMON)
    line, typed = with_beginning(line), ["finetune", *arguments]
    values = dict(line.values)
    folder, epochs = values.pop("folder", None), values.pop("epochs", None)
    if epochs is not None and "train.steps" in values:
        raise ConfigurationError("--epochs can't be combined with --steps. Leave one of them out.")
    if "checkpoint.resume" in values or line.file is not None:  # which is that of a run that begins again
        if folder or epochs is not None:
            raise ConfigurationError("--resume can't be combined with a model or --epochs. Leave one of them out.")
        return run_line(line, typed)
    epochs = FinetuneSettings.epochs if epochs is None else epochs
    check_number("--epochs", epochs, gt=0, lt=1_000_000)
    if "data.paths" not in values or (folder is None and "model.source" not in values):
        raise ConfigurationError(
            "diloco finetune needs a model and conversations: diloco finetune FOLDER --data chat.jsonl, where FOLDER "
            "holds a transformers model."
        )
    if folder is not None and (folder.expanduser() / "adapter_config.json").is_file() and not _is_model(folder):
        raise ConfigurationError(
            f"{folder} holds an adapter alone. Give the folder of its base model, or merge the two with peft first."
        )
    if folder is not None and not _is_model(folder):
        raise ConfigurationError(
            f"there is no folder {str(folder)!r} with a transformers model. A model of the Hugging Face hub is given "
            "as --model hf:NAME instead."
        )
    values = {"preset": "finetune"} | ({} if folder is None else {"model.source": f"hf:{folder}"}) | values
    line = with_torchrun(dataclasses.replace(line, file=None, values=values))
    corpus = None
    if "train.steps" not in values:
        from diloco.data import build_corpus

        configuration = compose_for_model(line)
        if configuration.data.local:
            raise ConfigurationError(
                "With data.local=True the replicas have different numbers of conversations, and all need the same "
                "--steps. Give it in place of --epochs."
            )
        corpus = build_corpus(configuration.data, length := configuration.train.sequence_length)
        rows = corpus.train.num_windows(length)
        batch_size = values.setdefault("train.batch_size", _usual_batch(configuration, rows))
        sequences = batch_size * configuration.network.replicas
        steps = values["train.steps"] = max(1, math.ceil(epochs * rows / sequences))
        inner_steps = values["sync.inner_steps"] = compose(line).sync.inner_steps
        values["train.steps"] = math.ceil(steps / inner_steps) * inner_steps  # the last round follows the last
    return run_line(line, typed, corpus)


def _is_model(folder: Path) -> bool:
    return (folder.expanduser() / "config.json").is_file()


def _usual_batch(configuration: Configuration, rows: int) -> int:
    """Return the preset's batch size, or less if there are fewer rows: one that is twice in a step teaches no more."""
    train, network = configuration.train, configuration.network
    smallest = max(network.replica_size, train.gradient_accumulation)
    size = max(smallest, min(train.batch_size, rows // network.replicas))
    return math.ceil(size / train.gradient_accumulation) * train.gradient_accumulation


def run_line(line: CommandLine, typed: Sequence[str], corpus: Corpus | None = None) -> int:
    """Train with the settings of a command line; the processes of other ranks are started as ``typed``.

    ``corpus`` is that of the settings, if it has been read already.
    """
    log_to_stderr(as_json=line.values.get("monitor.console") == "json")
    plan = dataclasses.replace(plan_run(line), corpus=corpus)
    settings = plan.configuration
    log_to_stderr(as_json=settings.monitor.console == "json")
    if line.print_config:
        from diloco.data import corpus_vocabulary_size
        from diloco.model import check_vocabulary
        from diloco.train import describe, identity, outline

        for note in plan.notes:
            say(f"note: {note}")
        size = settings.model.vocab_size or corpus_vocabulary_size(settings.data)
        model = outline(settings, size)
        check_vocabulary(model, size)
        facts = describe(settings, model) | identity(settings, model)
        print(plan.record, *(f"# {name}: {fact}" for name, fact in facts.items()), sep="\n")
        return DONE
    torchrun, launched = read_torchrun(os.environ), LAUNCHED in os.environ
    if line.found and not settings.network.elastic:
        raise ConfigurationError("--found founds the swarm of a run. Use it with --transport swarm, or leave it out.")
    role = dataclasses.replace(role_of(settings.network, torchrun), founds=line.found)
    if settings.data.local and role.kind == "launcher":
        raise ConfigurationError(
            "With data.local=True, each replica has data of its own, but this command would start all of them with the "
            "same. Start each by itself: --data FOLDER --replica 0, 1, ... --join HOST:PORT, an address of the machine "
            "of replica 0."
        )
    folder, again = settings.out or plan.source, bool(line.resume_or_start)
    if plan.places and role.is_first and not launched:  # before anything is read, written or listened at
        say(f"the settings in {plan.source} name places outside it: {plan.places}")
    if role.kind == "rank":
        code = _train_rank(plan, role, quiet="monitor.console" not in line.values, again=again)
        if torchrun is not None or launched or folder is None:  # the launcher of this process prints how to resume
            return code
    else:
        folder = folder or claim_numbered(plan)
        with claimed(folder, plan, again=again) as (lock, occupied):
            if occupied:
                raise not_empty(folder, folder)
            if role.kind == "peer":
                return _train_peer(plan, role, folder)
            if role.kind == "launcher":
                from diloco.train import launch

                more = ["--debug"] if DEBUG.get() else []
                if "out" not in line.values and plan.source is None:
                    more += ["--out", str(folder)]
                code = launch(
                    settings.network,  # only places may follow what is typed
                    lambda m, at: [typed[0], "--join", str(at), "--replica", str(m), *more, *typed[1:]],
                    say,
                    lock,
                )
            else:
                code = _train(plan, folder)
    if code == INTERRUPTED:
        resume = f"stopped; the state is saved. To resume: {resume_command(settings, folder)}"
        say(resume if has_checkpoints(folder) else "stopped before anything was saved")
    return code


def _train_peer(plan: RunPlan, role: Role, folder: Path) -> int:
    """Train as a peer of a swarm, and print how others join and, if it is stopped, how it resumes."""
    from diloco.train import NETWORKS, Swarm

    settings = plan.configuration
    fleets: list[Swarm] = []
    join = join_command(settings, folder)

    def meet(facts: Mapping[str, str], own: Path) -> Fleet:
        fleet = NETWORKS[settings.network.transport](settings, role, own, facts, None)
        assert isinstance(fleet, Swarm), "only a peer of a swarm starts like this"
        fleets.append(fleet)
        known = fleet.directory.listens_at()
        addresses = " ".join([address for address in known if not address.startswith("/ip4/127.")] or known)
        secret = " --secret-file FILE" if settings.network.secret_file else ""  # their copy of it
        secret += " --data FOLDER" if settings.data.local else ""  # their own
        nowhere = "nobody can join here yet: forward a port, or --join a `diloco relay` and wait for 3 minutes"
        say(f"others join with\n  {join}{secret} --join {addresses}" if addresses else nowhere)
        if limits := fleet.directory.limits_of_reach():
            say(limits)
        return fleet

    code = _train(plan, folder, meet)
    if code == INTERRUPTED:
        others, relays = (fleets[-1].left_at, fleets[-1].relays) if fleets else ((), ())
        resume = resume_command(settings, folder, relays, found=bool(relays))
        if others:
            resume = (
                f"while others train: {resume_command(settings, folder, others)}\ndiloco: if all have stopped, the one "
                f"that stopped last resumes first, and the others join it. To resume: {resume}"
            )
        say(f"stopped; the state is saved. To resume{' ' if others else ': '}{resume}")
    return code


def _train_rank(plan: RunPlan, role: Role, *, quiet: bool, again: bool) -> int:
    """Train as one of several ranks; ``quiet``: only rank 0 shows its progress; ``again``: as in `claimed`."""
    import torch

    from diloco.devices import gpu_of_process
    from diloco.train import NETWORKS, begin_attempt, held_step

    settings, attempt = plan.configuration, None
    if settings.train.device in ("auto", "cuda") and torch.cuda.is_available():
        device = gpu_of_process(role.index, shared=role.torchrun is None)
        settings = dataclasses.replace(settings, train=dataclasses.replace(settings.train, device=device))
    out, timeout_s = settings.out or plan.source, settings.network.start_timeout_s
    if role.rendezvous is None:  # torchrun has started all replicas
        attempt = begin_attempt(role, timeout_s, lambda: out or claim_numbered(plan))
        check_named(attempt.folder, plan)
        if attempt.restarted and not (plan.source and held_step(role.replica, attempt.folder) < 0):
            checkpoint = dataclasses.replace(settings.checkpoint, resume=str(attempt.folder))
            settings = dataclasses.replace(settings, checkpoint=checkpoint)
    base = attempt.folder if attempt else out
    if base is None:
        raise ConfigurationError(
            f"--replica {role.replica} needs --out, with the same folder for all replicas, such as --out runs/my-run."
        )
    folder = base / f"replica-{role.replica}" if role.replica else base
    folder = folder / f"rank-{role.position}" if role.position else folder
    if quiet and not role.is_first:
        settings = dataclasses.replace(settings, monitor=dataclasses.replace(settings.monitor, console="quiet"))

    def meet(facts: Mapping[str, str], own: Path) -> Fleet:
        fleet = NETWORKS[settings.network.transport](settings, role, own, facts, attempt)
        try:
            with fleet.group.all_or_none():
                if occupied and not (fleet.joining or fleet.restarted):
                    raise not_empty(folder, base)
            if attempt:
                attempt.accept_folder(fleet)
        except BaseException:
            fleet.close()
            raise
        return fleet

    locked = LAUNCHED in os.environ and role.is_first
    with claimed(folder, plan, of_rank=True, again=again, locked=locked) as (_, occupied):
        plan = dataclasses.replace(plan, configuration=settings, notes=plan.notes if role.is_first else ())
        return _train(plan, folder, meet, role)


def _train(
    plan: RunPlan,
    folder: Path,
    meet: Callable[[Mapping[str, str], Path], Fleet] | None = None,
    role: Role | None = None,
) -> int:
    """Train in ``folder``, and return the exit code: a run whose rounds were all void has failed.

    For a tracker, a process with all replicas is a single run; any other process is one run of a group. Without a
    role, it holds all replicas, or is a peer of a swarm.
    """
    from diloco.monitor import make_sinks
    from diloco.train import OVER, run_training

    settings, home, group = plan.configuration, folder.resolve(), None
    monitor, name = settings.monitor, home.name
    if role is not None:
        home = home.parent if role.position else home
        group = (home.parent if role.replica else home).name
        name = f"{group}-replica-{role.replica}"
        if role.position:  # it reports what position 0 does
            monitor = dataclasses.replace(monitor, sinks=tuple(filter(is_own, monitor.sinks)))
    elif settings.network.elastic:
        group, name = settings.network.run, settings.network.name or platform.node()
    config = told_settings(settings)
    moves = sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    sinks = make_sinks(monitor, folder, is_terminal=moves, config=config, name=name, group=group)
    with closing(sinks):
        if monitor.prometheus is not None and (role is None or not role.position):
            from diloco.watch import PrometheusSink

            host, port = monitor.metrics_address()
            shift = role.index if role and (role.torchrun or LAUNCHED in os.environ) else 0  # several on this machine
            sinks.sinks["the metrics"] = PrometheusSink(host, port + shift, name)
        summary = run_training(
            settings,
            folder=folder,
            sink=sinks,
            config_toml=plan.record,
            notes=plan.notes,
            meet=meet,
            corpus=plan.corpus,
        )
    all_void = summary.get("rounds_void") and not summary.get("rounds_committed")
    in_vain = all_void and not summary.get("joined_at_step")  # who has joined has what the others have learned
    if in_vain and (role is None or role.is_first):
        then = "resume" if summary["interrupted"] else "start a new run"
        say(
            "no round was committed, so the replicas have learned nothing from each other: all "
            f"{summary['rounds_void']} were void; metrics.jsonl says why. Remove the cause, then {then}."
        )
    interrupted = summary["interrupted"] and not (role is None and summary["interrupted"] == OVER)
    if interrupted:
        return INTERRUPTED
    return FAILED if in_vain else DONE
