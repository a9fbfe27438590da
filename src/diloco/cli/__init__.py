"""The command `diloco`. Each subcommand is a module of this package, imported when it is called."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from diloco import __version__
from diloco.cores import choose_waiting
from diloco.errors import ConfigurationError, DiLoCoError, nearest

__all__ = ["COMMANDS", "DONE", "INTERRUPTED", "main"]

COMMANDS = {
    "train": "train a language model with DiLoCo, Streaming DiLoCo, or a baseline",
    "finetune": "adapt a model of transformers to conversations, alone or with others",
    "tokenize": "text into a folder of tokens that training maps into memory",
    "evaluate": "held-out loss, perplexity and bits per byte of a trained model",
    "generate": "continue a text with a trained model",
    "export": "a trained model for transformers, or as one safetensors file",
    "inspect": "what a checkpoint holds",
    "doctor": "does the way to other replicas work, and what does it carry",
    "watch": "a page of runs and of a swarm, live or as one file",
    "peers": "who takes part in a run of --transport hivemind, and what each does",
    "dht": "be a peer that others find each other through, and that trains nothing",
    "simulate": "the compute utilisation that a link allows, and the link that one needs",
    "plan": "the settings for a model and a link that harm the loss least",
    "sweep": "a study: the same run with settings varied along axes",
    "presets": "the models to begin from, with their dimensions",
}
"""Every command and what it does; the module of the same name has ``run(arguments) -> exit code``."""

DONE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command and what follows it; None: those of the process.

    Returns:
        0 done, 1 failed, 2 bad usage or configuration, 130 interrupted. Messages are on stderr; an error that this
        package raises on purpose shows no traceback without ``--debug``.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:  # this process is the command's own
        choose_waiting(os.environ)
    debug = "--debug" in given
    given = [word for word in given if word != "--debug"]
    try:
        code = _dispatch(given)
        sys.stdout.flush()  # so that a reader who has left is noticed here
        return code
    except DiLoCoError as error:
        if debug:
            traceback.print_exc()
        else:
            nothing = " Nothing was started." if isinstance(error, ConfigurationError) else ""
            print(f"diloco: {error}{nothing}", file=sys.stderr)
        return MISUSED if isinstance(error, ConfigurationError) else FAILED
    except KeyboardInterrupt:
        print("diloco: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has left. What is still buffered must not raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _dispatch(given: Sequence[str]) -> int:
    if not given:
        print(_help(), end="", file=sys.stderr)
        return MISUSED
    command, rest = given[0], given[1:]
    if command in ("-h", "--help"):
        print(_help(), end="")
        return DONE
    if command == "--version":
        print(f"diloco {__version__}")
        return DONE
    if command not in COMMANDS:
        kind = "option" if command.startswith("-") else "command"
        hint = nearest(command, ["--help", "--version", "--debug"] if kind == "option" else COMMANDS)
        print(f"diloco: unknown {kind} {command!r}; {hint}", file=sys.stderr)
        return MISUSED
    from diloco.waiting import told_on_stderr

    told_on_stderr()
    run: Callable[[Sequence[str]], int] = importlib.import_module(f"diloco.cli.{command}").run
    try:
        return run(rest)
    except SystemExit as stop:  # tyro's way to end after --help (0) or a usage error (2)
        return stop.code if isinstance(stop.code, int) else DONE if stop.code is None else FAILED


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {about}" for name, about in COMMANDS.items())
    return f"""usage: diloco [--debug] COMMAND ...

Train one language model over links that are slow, far apart and unreliable.

commands:
{commands}

options:
  --help     this text; `diloco COMMAND --help` tells about one command
  --version  the version
  --debug    show a traceback with every error

examples:
  diloco train
  diloco evaluate runs/streaming-tiny
  diloco generate runs/streaming-tiny --prompt "import "

exit codes: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted (state saved)
"""
