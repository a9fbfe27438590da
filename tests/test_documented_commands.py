"""What the pages, messages and docstrings name exists: commands, settings, flags, TOML files, files and tests."""

import ast
import contextlib
import dataclasses
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.cli import COMMANDS
from diloco.config import Configuration, keys_of, parse_arguments, parse_flags, parse_options, typed_values

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "diloco"
PAGES = [ROOT / "README.md", ROOT / "tests" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = [path for folder in ("launch", "examples") for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
OTHERS = [path for path in FILES if path.suffix != ".pyc"]
EXAMPLES_OF_MISTAKES = ("keys.py", "toml.py", "units.py")
MODULES = [path for path in SOURCE.rglob("*.py") if path.name not in EXAMPLES_OF_MISTAKES]
KEYS = keys_of(Configuration)
TABLES = tuple(f"{name}." for name, key in KEYS.items() if key.is_table)
SECTIONS = {name.partition(".")[0] for name in KEYS if "." in name}
NAME = re.compile(rf"(?<![\w./{{-])(--)?({'|'.join(sorted(SECTIONS))})\.([a-z][\w.-]*\w)(?![\w(/*]|\.\w)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w.-])")
ATTRIBUTES = set(  # of modules, in docstrings
    ["model.layers", "model.weight", "model.embed_tokens", "model.norm", "transport.view", "optimizer.param_groups"]
)
# flags of pip, apt, git, docker, torchrun, SkyPilot, Slurm, tensorboard, wandb, lm_eval, llama.cpp
FOREIGN = """build-arg constraint create-home directory extra-index-url from group owner uid rm chmod yes quiet
porcelain error-unmatch no-install-recommends no-build-isolation nnodes nproc-per-node rdzv-backend rdzv-endpoint
rdzv-id standalone max-restarts master-addr master-port job-name nodes ntasks-per-node gpus-per-node gpus-per-task time
cpus-per-task requeue open-mode signal output kill-on-bad-exit logdir include-online tasks outfile outtype
node-rank env infra no-cache-dir strict force key-file socket pid-file log-file seed-file batch bind parsable
partition exclusive wrap kill"""
COMMAND = re.compile(
    r"(?:[\w-]*\$ )?(?:torchrun .* -m )?(?:\w+=\S+ )*(?:(?:docker run|kubectl exec) .* diloco )?diloco ([a-z].*)"
)
ENDS = {"&", "&&", "||", "|", ";", ">", ">>", "2>&1", "2>"}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every `diloco` command in the code blocks of a page."""
    for number, block in enumerate(re.split(r"^```", text, flags=re.MULTILINE)):
        language, _, lines = block.partition("\n")
        if number % 2 == 0 or language not in ("", "sh", "bash"):
            continue
        for line in lines.replace("\\\n", " ").splitlines():
            if found := COMMAND.match(line):
                yield until_end(shlex.split(found[1], comments=True))


def until_end(words: list[str]) -> list[str]:
    ends = [number for number, word in enumerate(words) if word in ENDS or word == "..."]
    return words[: ends[0]] if ends else words


def parse(command: str, arguments: list[str]) -> None:
    assert command in COMMANDS, command
    module = importlib.import_module(f"diloco.cli.{COMMANDS[command][0]}")
    if command == "train":
        parse_arguments(arguments)
    elif command in ("finetune", "plan"):
        parse_flags(getattr(module, f"{command.capitalize()}Settings"), command, "", arguments, shown={})
    else:
        parse_options(getattr(module, f"{command.capitalize()}Options"), command, arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_documented_commands_are_understood(page: Path) -> None:
    seen: set[tuple[str, ...]] = set()
    for command, *arguments in commands(page.read_text(encoding="utf-8")):
        if (command, *arguments) not in seen:
            seen.add((command, *arguments))
            with contextlib.suppress(SystemExit):  # of --help
                parse(command, arguments)
            if command in ("train", "finetune") and "--run" in arguments:
                assert "swarm" in arguments, arguments


def test_the_tests_named_on_the_pages_exist() -> None:
    text = "".join(page.read_text("utf-8") for page in PAGES)
    named = set(re.findall(r"(?:`|::)(test_\w+)`", text))
    files = set(re.findall(r"(?<=[`/])(test_\w+\.py)", text))
    paths = list((ROOT / "tests").rglob("*.py"))
    there = {name for path in paths for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))}
    assert named
    assert named - there == set()
    assert files - {path.name for path in paths} == set()


def strings(path: Path) -> Iterator[str]:
    """Yield the text of a page, or each string and docstring of a module."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        yield text
        return
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and not re.fullmatch(r"[\w.]+:\w+", node.value)
        ):
            yield node.value


def unknown_settings(text: str) -> set[str]:
    """Return the names such as `train.stesp` and `--train.stesp` in a text that are no setting."""
    unknown = set()
    for flag, section, rest in NAME.findall(text):
        name = f"{section}.{rest}".replace("-", "_")
        switch = KEYS.get(name.replace(".no_", "."))
        fits = name in KEYS or name.startswith(TABLES) or name in ATTRIBUTES or (switch and switch.is_switch)
        is_file = not flag and rest.rpartition(".")[2] in [
            "py",
            "md",
            "pt",
            "json",
            "jsonl",
            "safetensors",
            "toml",
            "yaml",
        ]
        if not fits and not is_file and not any(name.startswith(f"{each}.") for each in ATTRIBUTES):
            unknown.add(f"{flag}{section}.{rest}")
    return unknown


def known_flags() -> set[str]:
    """Return every flag of every command and of others' programs, without those that are named like a setting."""
    keys = list(KEYS.values())
    for module in {f"diloco.cli.{COMMANDS[command][0]}" for command in COMMANDS}:
        for kind in vars(importlib.import_module(module)).values():
            if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == module:
                keys += keys_of(kind).values()
    flags = {flag for key in keys for flag in (key.flag, *key.aliases)}
    flags |= {f"--no-{flag[2:]}" for flag in flags}
    flags |= {"--help", "--help-all", "--print-config", "--debug", "--version"}
    return flags | {"--epochs", "--resume-or-start", "--found"} | {f"--{name}" for name in FOREIGN.split()}


@pytest.mark.parametrize("path", [*PAGES, *OTHERS], ids=lambda path: path.name)
def test_settings_and_flags_named_on_a_page_exist(path: Path) -> None:
    prose = "\n".join(strings(path))
    assert unknown_settings(prose) == set()
    if "add_argument" not in path.read_text("utf-8"):  # an example with flags of its own
        assert set(FLAG.findall(prose)) - known_flags() == set()


def test_settings_and_flags_named_in_messages_and_docstrings_exist() -> None:
    flags = known_flags()
    named = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in MODULES
        for text in strings(path)
        for name in unknown_settings(text) | (set(FLAG.findall(text)) - flags if " " in text else set())
    }
    assert named == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_toml_on_a_page_is_accepted(page: Path) -> None:
    for number, block in enumerate(re.findall(r"^```toml\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)):
        if "[axes]" not in block:  # a study
            typed_values(tomllib.loads(block), Configuration, f"{page.name}, block {number}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sections_files_and_folders_named_on_a_page_exist(page: Path) -> None:
    missing = set()
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    for words in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)):
        if (section := re.fullmatch(r"\[(\w+)\]", words)) and not any(
            name.startswith(f"{section[1]}.") for name in KEYS
        ):
            missing.add(words)
        for name in re.findall(r"(?<![\w./-])(?:[a-z_]+/)+[\w.-]+(?![\w/(])", words):
            first = name.partition("/")[0]
            kept = (ROOT / first).is_dir() and first not in ("runs", "build")  # those are what commands write
            roots = [SOURCE] if first in packages else [ROOT] if kept else []
            if roots and not any((root / f"{name}{end}").exists() for root in roots for end in ("", ".py")):
                missing.add(name)
    assert missing == set()
