"""User code that a setting names as ``module:name``: finding it, calling it, and comparing it between replicas.

``module`` is an installed module, one in the working directory, or a path that ends in ``.py``. The settings in `KEYS`
name a class or function. Only the user names code: what a folder, a checkpoint or a peer says is compared (`confirm`).
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeGuard

from diloco.errors import ConfigurationError, nearest

KEYS = (
    *("model.source", "sync.codec", "sync.outer", "sync.average", "sync.merge", "optimizer.name"),
    "monitor.sinks",  # several names
)
"""Every setting that may name user code. `find` accepts no other, so that `confirm` forgets none."""

_NAME = re.compile(r"(?!hf:)(?P<place>.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")


def is_own(text: object) -> TypeGuard[str]:
    """Return whether the value of a setting names user code rather than a built-in or a model of transformers.

    >>> is_own("nets.py:build"), is_own("my.codecs:TopK"), is_own("fp4"), is_own("hf:gpt2"), is_own(None)
    (True, True, False, False, False)
    """
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def split(text: str) -> tuple[str, str]:
    """Return the module or path, and the name in it.

    >>> split("my.codecs:TopK")
    ('my.codecs', 'TopK')
    """
    place, _, name = text.rpartition(":")
    return place, name


def absolute(text: str) -> str:
    """Return ``text`` with an absolute path if it names an existing file, so that every working directory finds it."""
    place, name = split(text)
    path = Path(place).expanduser()
    names_file = is_own(text) and path.suffix == ".py" and path.exists()
    return f"{os.path.abspath(path)}:{name}" if names_file else text


def same_code(one: object, other: object) -> bool:
    """Return whether two names can mean the same code. A file may lie in another folder on another machine.

    >>> same_code("/home/ann/nets.py:build", "nets.py:build"), same_code("nets.py:build", "nets.py:other")
    (True, False)
    """
    if not is_own(one) or not is_own(other):
        return one == other
    (place, name), (elsewhere, named) = split(one), split(other)
    files = place.endswith(".py") and elsewhere.endswith(".py")
    return name == named and (Path(place).name == Path(elsewhere).name if files else place == elsewhere)


def own_code(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return those of the settings in `KEYS` that name user code, each with all its names.

    >>> own_code({"sync.codec": "fp4", "sync.merge": "share.py:Share", "monitor.sinks": ("my.sinks:Sink",)})
    {'sync.merge': ('share.py:Share',), 'monitor.sinks': ('my.sinks:Sink',)}
    """
    names = {key: values[key] for key in KEYS if key in values}
    names = {key: value if isinstance(value, tuple) else (value,) for key, value in names.items()}
    return {key: value for key, value in names.items() if any(map(is_own, value))}


def confirm(where: object, stored: Mapping[str, Any], typed: Mapping[str, Any]) -> None:
    """Check that the user has named the code that stored settings name. That code runs only if the user says so.

    Args:
        where: the folder or file that holds the settings, for the message.
        stored: setting -> value there.
        typed: setting -> value that the user has given in this call. Another tuple replaces what is stored.

    Raises:
        ConfigurationError: a name is missing in ``typed``, or is another; the message has the options to add.
    """
    if options := _unconfirmed(stored, typed):
        raise ConfigurationError(
            f"{where} was made with code that did not come with diloco, and a folder can't choose the code that runs "
            f"here.{_other_code(stored, typed)} If you have that code and trust it, add {options} to the command."
        )


def confirm_file(file: Path, stored: Mapping[str, Any], typed: Mapping[str, Any]) -> None:
    """Check that code named in a TOML file lies beside the file, or is named by the user, too.

    So a file alone doesn't run what somebody else has installed here.

    Args:
        file: the TOML file; code in its folder and in those below lies beside it.
        stored: setting -> value there.
        typed: setting -> value that the user has given in this call.

    Raises:
        ConfigurationError: a name is of code elsewhere, and missing in ``typed``; the message has the options to add.
    """
    folder = file.expanduser().resolve().parent
    distant = {
        key: names for key, names in own_code(stored).items() if not all(_lies_in(folder, name) for name in names)
    }
    if options := _unconfirmed(distant, typed):
        raise ConfigurationError(
            f"{file} names code that does not lie beside it, and a file alone can't choose the code that runs here."
            f"{_other_code(distant, typed)} If you trust that code, add {options} to the command, or put it beside the "
            "file."
        )


def _lies_in(folder: Path, text: str) -> bool:
    """Return whether the code that ``text`` names is in a file below ``folder`` that no installer has put there."""
    if not is_own(text):
        return True
    place, _ = split(text)
    if place.endswith(".py"):
        return Path(place).expanduser().resolve().is_relative_to(folder)
    sys.path.insert(0, here := str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(place.partition(".")[0])  # of a package; its code does not run
    except (ImportError, ValueError):
        return True  # `find` says that it can't be imported
    finally:
        sys.path.remove(here)
    if spec is None:
        return True
    homes = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location and spec.origin else ())]
    files = [Path(home).resolve() for home in homes]
    installed = any(part in ("site-packages", "dist-packages") for file in files for part in file.parts)
    return bool(files) and not installed and all(file.is_relative_to(folder) for file in files)


def _unconfirmed(stored: Mapping[str, Any], typed: Mapping[str, Any]) -> str:
    """Return the options that would name the stored code which the user has not named, or ""."""
    options = []
    for key, names in own_code(stored).items():
        if key in typed and (isinstance(typed[key], tuple) or same_code(names[0], typed[key])):
            continue
        options.append(f"{_option(key)} {shlex.join(names)}")
    return " ".join(options)


def _other_code(stored: Mapping[str, Any], typed: Mapping[str, Any]) -> str:
    given = [key for key, names in own_code(stored).items() if key in typed and not same_code(names[0], typed[key])]
    return "".join(f" {_option(key)} {typed[key]} is other code." for key in given if not isinstance(typed[key], tuple))


def _option(key: str) -> str:
    return "--model" if key == "model.source" else f"--{key}"


def find(key: str, text: str, kind: type) -> Callable[..., Any]:
    """Return the class or function that ``text``, the value of setting ``key``, names. It is not called.

    Args:
        kind: what it must return. Of a library, only its subclasses are accepted.

    Raises:
        ConfigurationError: the module can't be imported, has no callable of this name, or has one of a library, such as
            ``os:system``, which would run whatever the arguments in a TOML file say.
    """
    assert key in KEYS, key
    place, name = split(text)
    is_file = place.endswith(".py")
    _refuse(key, text, "" if is_file else place, sys.stdlib_module_names)
    try:
        module = _load_file(place) if is_file else _load_module(place)
    except Exception as error:
        raise ConfigurationError(
            f"{place} of {key}={text} can't be imported: {type(error).__name__}: {error}. Use an installed module, "
            "one in the working directory, or a .py file."
        ) from error
    function: Any = getattr(module, name, None)
    if not callable(function):
        callables = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ConfigurationError(
            f"{place} of {key}={text} has no function or class {name!r}; {nearest(name, callables)}"
        )
    if kind not in getattr(function, "__mro__", ()):
        inner = inspect.unwrap(function)  # it is of the library that defines it, whoever imports it
        defined = inspect.isfunction(inner) or inspect.isbuiltin(inner) or inspect.isclass(inner)
        required = {re.split(r"[^\w.-]", require)[0] for require in metadata.requires("diloco") or ()}
        _refuse(key, text, (defined and inner.__module__) or module.__name__, required | sys.stdlib_module_names)
    return function  # type: ignore[no-any-return]  # callable, as checked above


def call(
    key: str,
    text: str,
    *given: Any,
    kind: type,
    arguments: Mapping[str, Any],
    offered: Mapping[str, Any] | None = None,
) -> Any:
    """Call the class or function that ``text`` names, and check what it returns.

    Args:
        key: the setting that names it, such as ``sync.codec``; ``text`` is its value.
        kind: what it must return. An object fits a protocol if it has its methods.
        arguments: keyword arguments, all of which it must take.
        offered: further keyword arguments, passed if it takes them and ``arguments`` does not contain them.

    Raises:
        ConfigurationError: if it can't be found, is of another kind, does not take an argument, or raises.
    """
    function = find(key, text, kind)
    check_arguments(key, text, function, arguments)
    fitting = {name: value for name, value in (offered or {}).items() if takes(function, name)}
    try:
        result = function(*given, **(fitting | dict(arguments)))
    except Exception as error:
        raise ConfigurationError(
            f"{text} raised {type(error).__name__}: {error} (diloco --debug shows where)."
        ) from error
    lack = ""
    if inspect.isclass(result):
        lack = "is a class and not its instance"
    elif getattr(kind, "_is_protocol", False):
        methods = (
            name for name, member in vars(kind).items() if inspect.isfunction(member) and not name.startswith("_")
        )
        lack = next((f"has no method {name}" for name in methods if not callable(getattr(result, name, None))), "")
    elif not isinstance(result, kind):
        lack = f"is no {kind.__name__} of {kind.__module__.partition('.')[0]}"
    if lack:
        raise ConfigurationError(f"{key}={text} can't be used: it returned a {type(result).__name__}, which {lack}.")
    return result


def _refuse(key: str, text: str, module: str, libraries: Collection[str]) -> None:
    root = module.partition(".")[0]
    if root in libraries:
        raise ConfigurationError(
            f"{key}={text} names something of the library {root}, which is not your own code. Name your own class or "
            "function as module:name or FILE.py:name."
        )


def check_arguments(key: str, text: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` unless ``function``, which ``text`` names, takes all of these keyword arguments."""
    section, _, role = key.partition(".")
    table = f"sync.arguments.{role}" if section == "sync" else f"{section}.arguments"
    check_switches(table, function, arguments)
    for name in arguments:
        if not takes(function, name):
            hint = nearest(name, inspect.signature(function).parameters)
            raise ConfigurationError(f"{table}.{name} is not an argument of {text}; {hint}")


def check_switches(table: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` for true or false where ``function`` has a number as the default of an argument.

    Python would take them for 1 and 0. ``table.NAME`` names the argument in the message.
    """
    parameters = inspect.signature(function).parameters
    for name, value in arguments.items():
        default = parameters[name].default if name in parameters else None
        if isinstance(value, bool) and isinstance(default, int | float) and not isinstance(default, bool):
            raise ConfigurationError(f"{table}.{name} must be a number such as {default!r}, got {value!r}.")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether ``function`` takes a keyword argument of this name.

    Raises:
        ConfigurationError: its arguments are unknown, as of a function that is written in C.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{str(error)[:100]}. Write a function in Python that calls it.") from error
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def code_digest(value: object) -> str:
    """Return a digest of the file that defines the class of ``value``, or ``value`` if that is a class or function.

    It is "" for this package's code, which the version identifies, for code in a script, which may differ between
    machines, and for code without a file.

    >>> from diloco.algorithm.codec.base import Float32
    >>> code_digest(Float32())
    ''
    """
    is_kind = inspect.isroutine(value) or isinstance(value, type)
    kind = value if is_kind else type(value)
    module = getattr(kind, "__module__", None) or ""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module.partition(".")[0] in ("diloco", "builtins", "__main__") or file is None:
        return ""
    return hashlib.sha256(Path(file).read_bytes().replace(b"\r\n", b"\n")).hexdigest()[:16]


def _load_module(name: str) -> Any:
    """Import ``name``, also from the working directory, as ``python -m`` does."""
    sys.path.insert(0, here := str(Path.cwd()))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)


def _load_file(path: str) -> Any:
    """Execute a file as a module, once for each content, since a class can be registered only once."""
    file = Path(path).expanduser().resolve()
    text = file.read_bytes()
    content = hashlib.sha256(str(file).encode() + b"\0" + text).hexdigest()
    name = f"diloco_own_{file.stem}_{content[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, among others, look up their module
    try:
        # compile the bytes read above: bytecode in `__pycache__` may be stale if the file was edited within a second
        exec(compile(text, file, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module
