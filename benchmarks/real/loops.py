"""Loops, Trainers and optimizers of others, in two processes with README's lines; each way to run them is a row."""

import importlib.metadata
import json
import re
import shutil
from pathlib import Path
from typing import Any

from benchmarks.real.peers import version
from benchmarks.real.running import HERE, RefusedError, WrongError, free_port, patched, run
from benchmarks.real.texts import conversations, play
from benchmarks.real.trying import Tries

NANOGPT = """train.py config/train_shakespeare_char.py --device=cpu --compile=False --dtype=float32 --eval_iters=2
 --block_size=64 --batch_size=4 --n_layer=2 --n_head=2 --n_embd=32 --max_iters=60 --lr_decay_iters=60 --dropout=0.0
 --eval_interval=1000 --backend=gloo"""
README_LINES = """
import contextlib
from diloco import DiLoCo, SyncSchedule, connect_process_group, connect_tcp
stack = contextlib.ExitStack()
transport = stack.enter_context({connect})
schedule = SyncSchedule(inner_steps=10, num_fragments=2, overlap_steps=2)
diloco = stack.enter_context(DiLoCo(model, optimizer, schedule=schedule, transport=transport, codec="fp4"))
torch.manual_seed({seed})  # each replica draws other batches
"""
OVER_TCP = 'connect_tcp(replica=int(out_dir[-1]), num_replicas=2, rendezvous=os.environ["JOIN"])'
AT_END = """
stack.close()
import json
facts = {"digest": diloco.digest(), "rounds": diloco.rounds_committed, "loss": round(loss.item(), 4)}
print("\\nEND " + json.dumps(facts))
"""
BEFORE_LOOP = "# helps estimate an arbitrarily accurate loss"
ON_CPU = {"    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n": ""}
SAME_START = {"    seed_offset = ddp_rank # each": "    seed_offset = 0 # each"}
WITHOUT_DDP = {"    model = DDP(model, device_ids=[ddp_local_rank])": "    pass"}
DDP_ON_CPU = {"device_ids=[ddp_local_rank]": ""}
CALLS_OF_DDP = {"raw_model = model.module if ddp else model": "raw_model = model"}


def ends(printed: list[str]) -> list[dict[str, Any]]:
    """Return the last line of each process of a run, which must agree on the digest.

    Raises:
        WrongError: if a process printed none, or digests differ.
    """
    lines = [json.loads(found[-1]) for text in printed if (found := re.findall(r"^END (\{.*\})$", text, re.MULTILINE))]
    if len(lines) < 2:
        raise WrongError(f"{2 - len(lines)} of 2 processes did not come to their end")
    if len({line["digest"] for line in lines}) > 1:
        raise WrongError(f"digests differ: {[line['digest'] for line in lines]}")
    return lines


def same(lines: list[dict[str, Any]], *keys: str) -> None:
    """Raise WrongError if the processes of a run differ in one of these values."""
    for key in keys:
        if lines[0][key] != lines[1][key]:
            raise WrongError(f"{key} differs between replicas: {lines[0][key]} and {lines[1][key]}")


def program(name: str, work: Path, text: Path, resume: str = "", again: bool = False) -> list[dict[str, Any]]:
    """Run a program of `benchmarks.real.programs` as two replicas, and return their last lines."""
    folder, join = work / "loops" / name, f"127.0.0.1:{free_port()}"
    if not again:
        shutil.rmtree(folder, ignore_errors=True)
    words = ["-m", f"benchmarks.real.programs.{name}", "--join", join, "--text", str(text), "--resume", resume]
    commands = [[*words, "--replica", str(m), "--out", str(folder / f"replica-{m}")] for m in range(2)]
    return ends(run(commands, folder))


def resumed(name: str, work: Path, text: Path, checkpoint: str) -> str:
    """Run a program, then again from a checkpoint of the first run: both must end alike."""
    whole = program(name, work, text)
    same(whole, "model")
    again = program(name, work, text, checkpoint, again=True)
    same(again, "model")
    if (again[0]["digest"], again[0]["model"]) != (whole[0]["digest"], whole[0]["model"]):
        raise WrongError(
            f"resumed from {checkpoint} it ends with digest {again[0]['digest']}, not {whole[0]['digest']}"
        )
    return f"{whole[0]['rounds']} rounds, models equal, digest {whole[0]['digest'][:12]}; the same from {checkpoint}"


def early_stopping(work: Path, text: Path) -> str:
    lines = program("early_stopping", work, text)
    same(lines, "losses", "stopped", "model")
    return f"both stop at step {lines[0]['stopped']} with the same evaluations and model"


def lightning(work: Path, text: Path) -> str:
    lines = program("lightning_fit", work, text)
    same(lines, "losses", "model")
    return f"{lines[0]['rounds']} rounds, validation and modules equal, BatchNorm's buffers too"


def accelerate(work: Path, text: Path) -> str:
    lines = program("accelerate_loop", work, text)
    same(lines, "model")
    saved = [next((work / "loops/accelerate_loop" / f"replica-{m}" / "saved").glob("*.safetensors")) for m in range(2)]
    if saved[0].read_bytes() != saved[1].read_bytes():
        raise WrongError("save_pretrained wrote two different models")
    return f"{lines[0]['rounds']} rounds, both saved the same model"


def schedule_free(work: Path, text: Path) -> str:
    lines = program("schedule_free", work, text)
    worst = max(line["apart"] for line in lines)
    if worst > 1e-5:
        raise WrongError(f"after a merge it moves the parameters by {worst:.3f} otherwise than a twin without a merge")
    rounds, moved = lines[0]["rounds"], lines[0]["moved"]
    return f"{rounds} rounds; after a merge it moves the parameters by {moved:.2f}, a twin's without one to {worst:.0e}"


def sft(work: Path, text: Path) -> str:
    del text
    from benchmarks.real.tokenizers import FAMILIES, fetch, tiny_model, tokenizer_of

    base = work / "base"
    if not base.exists():
        tiny_model(FAMILIES["llama2"], tokenizer_of(fetch("llama2", work)[0]), base)
    return resumed("sft", work, conversations(work), "checkpoint-7")


def nanogpt(checkout: Path, work: Path, way: str) -> list[dict[str, Any]]:
    """Run nanoGPT's train.py on a play with README's lines: over TCP, under torchrun, or with its DDP left in."""
    folder = work / "loops" / f"nanogpt-{way}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git"))
    shutil.copy(play(work), folder / "data/shakespeare_char/input.txt")
    run([["data/shakespeare_char/prepare.py"]], folder)
    tcp = way == "TCP"
    seed = "1338 + int(out_dir[-1])" if tcp else "1338 + ddp_rank"
    lines = README_LINES.format(connect=OVER_TCP if tcp else "connect_process_group()", seed=seed)
    changes = {
        BEFORE_LOOP: lines + BEFORE_LOOP,
        "optimizer.zero_grad(set_to_none=True)": "optimizer.zero_grad(set_to_none=True); diloco.step()",
    }
    changes |= {"if ddp:\n    destroy_process_group()": AT_END + "if ddp:\n    destroy_process_group()"}
    if not tcp:
        changes |= ON_CPU | SAME_START | (WITHOUT_DDP | CALLS_OF_DDP if way == "torchrun" else DDP_ON_CPU)
    patched(checkout / "train.py", folder / "train.py", changes)
    if tcp:
        words = [[*NANOGPT.split(), f"--out_dir=out-{m}"] for m in range(2)]
        return ends(run(words, folder, JOIN=f"127.0.0.1:{free_port()}"))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    line = [*torchrun, *NANOGPT.split(), "--gradient_accumulation_steps=2"]  # which it divides by the ranks
    [printed] = run([line], folder)
    found = re.findall(r"^END \{.*\}$", printed, re.MULTILINE)
    return ends(found)


def left_in(checkout: Path, work: Path) -> str:
    """Leave DDP(model) in: it must be refused, or average no gradients."""
    try:
        lines = nanogpt(checkout, work, "DDP")
    except WrongError as error:
        if "ConfigurationError" in str(error):
            raise RefusedError(str(error).partition("ConfigurationError: ")[2]) from error
        raise
    loss = nanogpt(checkout, work, "torchrun")[0]
    if lines[0]["digest"] != loss["digest"]:
        raise WrongError("it trains, but not as without DDP: gradients are averaged at every step")
    return "it trains as without DDP: no gradient is averaged"


def try_all(tries: Tries, work: Path, only: list[str], checkout: Path | None) -> None:
    """Run every loop; nanoGPT's needs a checkout."""
    tries.hidden |= {str(work) + "/": "", str(HERE) + "/": ""}
    text = play(work)
    of = importlib.metadata.version
    sizes = (f"transformers {of('transformers')}", f"lightning {of('lightning')}", f"accelerate {of('accelerate')}")
    own: dict[str, tuple[str, Any]] = {
        "Trainer as in run_clm, resumed": (sizes[0], lambda: resumed("trainer", work, text, "checkpoint-9")),
        "Trainer, early stopping, BatchNorm": (sizes[0], lambda: early_stopping(work, text)),
        "SFTTrainer with LoRA, resumed": (f"trl {of('trl')}", lambda: sft(work, text)),
        "Lightning, BatchNorm": (sizes[1], lambda: lightning(work, text)),
        "Accelerate, saved after the block": (sizes[2], lambda: accelerate(work, text)),
        "schedule-free": (f"schedulefree {found('schedulefree')}", lambda: schedule_free(work, text)),
    }
    names = dict(
        zip(own, ("trainer", "early_stopping", "sft", "lightning_fit", "accelerate_loop", "schedule_free"), strict=True)
    )
    for name, (thing, step) in own.items():
        if not only or names[name] in only:
            tries(name, thing, f"python -m benchmarks.real.programs.{names[name]} --replica M", step)
    if checkout is not None and (not only or "nanogpt" in only):
        thing = f"karpathy/nanoGPT {version(checkout)[:7]}"
        for way, line in (("TCP", "python train.py ..."), ("torchrun", "torchrun --nproc-per-node 2 train.py ...")):

            def both(way: str = way) -> str:
                lines = nanogpt(checkout, work, way)
                return f"{lines[0]['rounds']} rounds, loss {lines[0]['loss']}, digest {lines[0]['digest'][:12]}"

            tries(f"nanoGPT, {way}", thing, line, both)
        tries(
            "nanoGPT, DDP left in", thing, "torchrun --nproc-per-node 2 train.py ...", lambda: left_in(checkout, work)
        )


def found(package: str) -> str:
    """Return the version of a package that may be missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
