"""User code that a setting names as ``module:name``: finding it, calling it, and comparing it between replicas.

``module`` is an installed module, one in the working directory, or a path that ends in ``.py``. `model.source` names a
function; ``codec.name``, ``outer.name``, ``outer.average``, ``merge.rule``, ``inner.name`` and ``monitor.sinks`` name a
class or function.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from diloco.errors import ConfigurationError, nearest

__all__ = ["absolute", "call", "check_arguments", "code_digest", "find", "is_own", "split", "takes"]

_NAME = re.compile(r"(?P<place>.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")


def is_own(text: str | None) -> TypeGuard[str]:
    """Return whether the value of a setting names user code rather than a built-in.

    >>> is_own("nets.py:build"), is_own("my.codecs:TopK"), is_own("fp4"), is_own(None)
    (True, True, False, False)
    """
    return text is not None and _NAME.fullmatch(text) is not None


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
    return f"{os.path.abspath(path)}:{name}" if is_own(text) and path.suffix == ".py" and path.exists() else text


def find(key: str, text: str) -> Callable[..., Any]:
    """Return the class or function that ``text``, the value of setting ``key``, names.

    Raises:
        ConfigurationError: if the module can't be imported or has no callable of this name.
    """
    if not is_own(text):
        raise ConfigurationError(f"{key}={text} does not name your own code. Use module:name or FILE.py:name.")
    place, name = split(text)
    try:
        module = _load_file(place) if place.endswith(".py") else _load_module(place)
    except Exception as error:
        raise ConfigurationError(
            f"{place} of {key}={text} can't be imported: {type(error).__name__}: {error}. Use an installed module, "
            "one in the working directory, or a .py file."
        ) from error
    found: Any = getattr(module, name, None)
    if not callable(found):
        callables = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ConfigurationError(
            f"{place} of {key}={text} has no function or class {name!r}; {nearest(name, callables)}"
        )
    return found  # type: ignore[no-any-return]  # callable, as checked above


def call(
    key: str, text: str, *given: Any, arguments: Mapping[str, Any], offered: Mapping[str, Any] | None = None
) -> Any:
    """Call the class or function that ``text`` names.

    Args:
        key: The setting that names it, such as ``codec.name``. Its section has ``arguments``.
        text: The value of that setting.
        given: Positional arguments.
        arguments: Keyword arguments, all of which it must take.
        offered: Further keyword arguments, passed if it takes them and ``arguments`` does not contain them.

    Raises:
        ConfigurationError: if it can't be found, does not take an argument, or raises.
    """
    function = find(key, text)
    check_arguments(key, text, function, arguments)
    fitting = {name: value for name, value in (offered or {}).items() if takes(function, name)}
    try:
        return function(*given, **(fitting | dict(arguments)))
    except Exception as error:
        raise ConfigurationError(
            f"{text} raised {type(error).__name__}: {error} (diloco --debug shows where)."
        ) from error


def check_arguments(key: str, text: str, function: Callable[..., Any], arguments: Iterable[str]) -> None:
    """Raise `ConfigurationError` unless ``function``, which ``text`` names, takes all of these keyword arguments."""
    for name in arguments:
        if not takes(function, name):
            accepted = inspect.signature(function).parameters
            raise ConfigurationError(
                f"{key.partition('.')[0]}.arguments.{name} is not an argument of {text}; {nearest(name, accepted)}"
            )


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether ``function`` takes a keyword argument of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def code_digest(value: object) -> str:
    """Return a digest of the file that defines the class of ``value``, or ``value`` if that is a class or function.

    It is "" for this package's code, which the version identifies, for code in a script, which may differ between
    machines, and for code without a file.

    >>> from diloco.algorithm.codec import Float32
    >>> code_digest(Float32())
    ''
    """
    kind = value if inspect.isroutine(value) or isinstance(value, type) else type(value)
    module = getattr(kind, "__module__", None) or ""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module.partition(".")[0] in ("diloco", "builtins", "__main__") or file is None:
        return ""
    try:
        text = Path(file).read_bytes()
    except OSError:
        return ""
    return hashlib.sha256(text.replace(b"\r\n", b"\n")).hexdigest()[:16]


def _load_module(name: str) -> Any:
    """Import ``name``, also from the working directory, as ``python -m`` does."""
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    finally:
        if added:
            sys.path.remove(here)


def _load_file(path: str) -> Any:
    """Execute a file as a module, once for each content, since a class can be registered only once."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
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
