"""The command `diloco`. Each subcommand is a module of this package that is imported when it is called."""

import errno
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco import __version__
from diloco.devices import set_wait_policy
from diloco.errors import DEBUG, ConfigurationError, DiLoCoError, nearest
from diloco.terminal import StandardOutput, make_streams_safe, show_visibly
from diloco.waiting import log_to_stderr, say

__all__ = ["COMMANDS", "DONE", "FAILED", "INTERRUPTED", "main"]

COMMANDS = {
    "train": ("train", "train a language model with DiLoCo, Streaming DiLoCo or a baseline"),
    "finetune": ("train", "fine-tune a transformers model on conversations"),
    "tokenize": ("tokenize", "turn text into a folder of packed tokens for training"),
    "evaluate": ("trained", "measure the loss, perplexity and bits per byte of a trained model"),
    "generate": ("trained", "continue a text with a trained model, or chat with it"),
    "export": ("trained", "write a trained model for transformers or peft"),
    "plan": ("plan", "predict what settings cost on a link, and which others fit it"),
    "sweep": ("sweep", "run a study: the same run with settings varied along axes"),
    "doctor": ("network", "check the connection to other replicas: names, ports, latency, bandwidth"),
    "status": ("status", "show what a checkpoint holds, or what the peers of a swarm are doing"),
    "watch": ("status", "show runs and swarms on a web page, live or as one file"),
    "relay": ("network", "run a bootstrap node for a swarm"),
    "secret": ("network", "create the secret that keeps others out of a run"),
    "presets": ("plan", "list the model presets and their dimensions"),
}
"""Every command, with the module of its ``run_COMMAND(arguments) -> exit code``, and a description."""

DONE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # Python names no file in these


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command and its arguments. Default: those of the process.

    Returns:
        The exit code: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted. Messages go to stderr. A
        `DiLoCoError` is shown without a traceback unless ``--debug`` is given.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:  # the process runs nothing but this command, so its environment may be changed
        set_wait_policy(os.environ)
        make_streams_safe()
    streams = sys.stdout, sys.stderr
    show_visibly()
    DEBUG.set("--debug" in words[:1])  # in any other place the parser of the command finds it
    words = words[DEBUG.get() :]
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # raise BrokenPipeError here, not at exit, if the reader has closed the pipe
        return code
    except DiLoCoError as error:
        if DEBUG.get():
            traceback.print_exc()
        elif not _said_already(str(error)):
            trains = isinstance(error, ConfigurationError) and words[:1] in (["train"], ["finetune"])
            say(f"{error}{' Nothing was started.' if trains else ''}", "error")
        return MISUSED if isinstance(error, ConfigurationError) else FAILED
    except KeyboardInterrupt:
        say("interrupted.", "error")
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        if DEBUG.get():
            traceback.print_exc()
        else:
            cause = str(error).partition("\n")[0].rstrip(".") or "MemoryError"
            say(f"out of memory: {cause}. Use smaller batches, shorter sequences or a smaller model.", "error")
        return FAILED
    except OSError as error:
        if (what := _what_failed(error)) == "" or (DEBUG.get() and error is not StandardOutput.failure):
            raise
        if not isinstance(error, BrokenPipeError):  # a reader that has closed the pipe wants no more
            say(f"{what}: {error.strerror}.", "error")
        return FAILED
    finally:
        if arguments is not None:  # otherwise the traceback of an unexpected error is still to be printed
            sys.stdout, sys.stderr = streams


def _is_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Return whether there was too little memory; torch has a type of its own for that, but none on a CPU."""
    name = type(error).__name__
    return name in ("MemoryError", "OutOfMemoryError") or "DefaultCPUAllocator: can't allocate" in str(error)


def _what_failed(error: OSError) -> str:
    """Return what the system has refused; "" if the error doesn't say."""
    if error is StandardOutput.failure:
        return "the output cannot be written"
    if error.filename:
        return f"{error.filename} can't be used"
    return "a file can't be written" if error.errno in _FULL else ""


def _said_already(message: str) -> bool:
    """Return whether another process of the same torchrun has printed it here; that is noted among its logs."""
    name = f"said-{hashlib.sha256(message.encode(errors='backslashreplace')).hexdigest()}"
    try:
        (Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / name).touch(exist_ok=False)
    except (LookupError, OSError) as error:
        return isinstance(error, FileExistsError)
    return False


def _dispatch(words: Sequence[str]) -> int:
    if not words:
        print(_help(), end="", file=sys.stderr)
        return MISUSED
    command, *rest = words
    if command in ("-h", "--help"):
        print(_help(), end="")
        return DONE
    if command == "--version":
        print(f"diloco {__version__}")
        return DONE
    if command not in COMMANDS:
        kind = "option" if command.startswith("-") else "command"
        hint = nearest(command, ["--help", "--version", "--debug"] if kind == "option" else COMMANDS)
        raise ConfigurationError(f"unknown {kind} {command!r}; {hint}")
    log_to_stderr()
    module = importlib.import_module(f"diloco.cli.{COMMANDS[command][0]}")
    run: Callable[[Sequence[str]], int] = getattr(module, f"run_{command}")
    try:
        return run(rest)
    except SystemExit as stop:  # tyro exits after --help (0) or a usage error (2)
        if stop.code is None:
            return DONE
        return stop.code if isinstance(stop.code, int) else FAILED


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items())
    return f"""usage: diloco [--debug] COMMAND ...

Train one language model on machines that are connected by slow, distant and unreliable links.

commands:
{commands}

options:
  --help     show this text; `diloco COMMAND --help` describes one command
  --version  show the version
  --debug    show a traceback with every error

examples:
  diloco train
  diloco evaluate runs/streaming-tiny
  diloco generate runs/streaming-tiny --prompt "import "

exit codes: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted (the state is saved)
If the output can't be written, training goes on and other commands end with 1.
"""
