"""Imports are layered: a package imports only from itself and from packages before it in the order.

From another package it imports only public names, those in that package's ``__init__.pyi``; so do tests and benchmarks.
"""

import ast
import functools
import importlib
from pathlib import Path

import pytest

import diloco

ORDER = (
    "errors",
    "plugins",
    "private_files",
    "traits",
    "units",
    "terminal",
    "waiting",
    "signals",
    "devices",
    "metrics",
    "events",
    "algorithm",
    "testing",
    "membership",
    "protocol",
    "state_tree",
    "transport",
    "checkpoint",
    "outer",
    "model",
    "data",
    "trained",
    "train",
    "monitor",
    "watch",
    "plan",
    "integrations",
    "config",
    "sweep",
    "cli",
)
ROOT = Path(diloco.__file__).parent
PACKAGES = {stub.parent.name for stub in ROOT.glob("*/__init__.pyi")} | {"cli"}
# what needs an optional library is imported from its module
USERS = [
    path
    for folder in (ROOT, *map(ROOT.parents[1].joinpath, ("tests", "benchmarks", "examples")))
    for path in folder.rglob("*.py")
]
MODULES_OF_LIBRARIES = {f"diloco.integrations.{name}" for name in ("accelerate", "lightning", "transformers")}
FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem in ORDER)


@functools.cache
def nodes(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Call]:
    """Return all import statements and calls of a file, at any depth."""
    every = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in every if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)]


def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in nodes(path) if not isinstance(node, ast.Call)]


def imported(path: Path) -> set[str]:
    """Return the top-level parts of the package that a file imports at any depth, without ``__version__``."""
    parts: set[str] = set()
    for node in imports(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "diloco":
            names = [node.module] if "." in node.module else [f"diloco.{alias.name}" for alias in node.names]
            parts.update(name.split(".")[1] for name in names)
        elif isinstance(node, ast.Import):
            parts.update(a.name.split(".")[1] for a in node.names if a.name.startswith("diloco."))
    return parts - {"__version__"}


def test_imports_go_one_way() -> None:
    for path in FILES:
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        assert part in ORDER, f"{part} has no place in the order"
        later = [name for name in imported(path) if name not in ORDER[: ORDER.index(part) + 1]]
        assert not later, f"{path.relative_to(ROOT)} imports {later}, which come after it"


@functools.cache
def public_names(package: str) -> set[str]:
    """Return the names that a package's ``__init__.pyi`` exports."""
    stub = ROOT / package / "__init__.pyi"
    if not stub.exists():  # diloco.cli
        return set(importlib.import_module(f"diloco.{package}").__all__)
    return {alias.name for node in imports(stub) if isinstance(node, ast.ImportFrom) for alias in node.names}


@functools.cache
def imported_names(path: Path) -> list[str]:
    """Return what a file imports from other packages, or replaces there by name in a test, as dotted names."""
    own = path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else ""
    names = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            module = f"diloco.{node.module}" if node.level else node.module  # relative: the stub of the package itself
            names += [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [f"{alias.name}." for alias in node.names if alias.name.count(".") > 1]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in {"setattr", "patch"} and node.args:
            names += [target.value for target in node.args[:1] if isinstance(target, ast.Constant)]
    parts = [(name, str(name).split(".")) for name in names]
    return [name for name, (root, *rest) in parts if root == "diloco" and len(rest) > 1 and own != rest[0] in PACKAGES]


def test_only_public_names_of_other_packages_are_imported() -> None:
    reached = {}
    for path in USERS:
        names = [name for name in imported_names(path) if ".".join(name.split(".")[:3]) not in MODULES_OF_LIBRARIES]
        inner = [name for name in names if name.split(".", 2)[2] not in public_names(name.split(".")[1])]
        reached.update({str(path): inner} if inner else {})
    assert not reached


def test_public_names_exist_and_are_used() -> None:
    used = {name for path in [*USERS, ROOT / "__init__.pyi"] for name in imported_names(path)}
    for package in sorted(PACKAGES - {"cli"}):
        module = importlib.import_module(f"diloco.{package}")
        assert not [name for name in public_names(package) if not hasattr(module, name)]
        assert not [name for name in public_names(package) if f"diloco.{package}.{name}" not in used], package


@pytest.mark.parametrize("part", ["algorithm", "membership", "protocol"])
def test_what_decides_is_pure(part: str) -> None:
    """These packages use no process groups, clocks, threads, futures, sockets, files or loggers."""
    impure = {"time", "threading", "concurrent", "socket", "logging", "asyncio", "pathlib", "io", "random", "hivemind"}
    for path in (ROOT / part).rglob("*.py"):
        if path.name == "native.py":  # finds and loads the compiled kernels
            continue
        for node in imports(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & impure, f"{path.name} imports {names}"
            assert not any(name.startswith("torch.distributed") for name in names)


def test_transports_stand_on_connections() -> None:
    """``connections`` does not import ``peers``, and ``peers`` does not import the backends that carry its bytes."""
    order = ("connections", "peers", "tcp|swarm")
    for path in (ROOT / "transport").rglob("*.py"):
        room = path.parent.name
        floor = next((floor for floor, rooms in enumerate(order) if room in rooms.split("|")), -1)
        modules = [node.module or "" for node in imports(path) if isinstance(node, ast.ImportFrom)]
        found = {module.split(".")[2] for module in modules if module.startswith("diloco.transport.")}
        later = found & {room for rooms in order[floor + 1 :] for room in rooms.split("|")}
        assert not later, f"{path.relative_to(ROOT)} imports {later}, which come after it"


def test_settings_do_not_import_torch() -> None:
    """This keeps help texts and configuration errors fast."""
    for path in ROOT.rglob("settings.py"):
        assert "import torch" not in path.read_text(encoding="utf-8")


def test_what_windows_lacks_is_not_imported_there() -> None:
    """Such imports are under `if sys.platform != "win32"`, never at the top level of a file."""
    lacking = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
    for path in ROOT.rglob("*.py"):
        for node in (each for each in imports(path) if not each.col_offset):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not lacking.intersection(names), f"{path.name} imports {names}"
