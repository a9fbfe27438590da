"""``diloco secret``: create the secret that keeps others out of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from diloco.config import parse_options
from diloco.errors import ConfigurationError

DESCRIPTION = """Write a new random secret into a file that only you can read. Every machine of a run needs a copy.

Examples:
  diloco secret run.secret"""


@dataclass(frozen=True, kw_only=True)
class SecretOptions:
    """The options of `diloco secret`."""

    file: Annotated[Positional[Path], arg(metavar="FILE", help_behavior_hint="")]
    """The file to create. An existing one is left as it is."""


def run(arguments: Sequence[str]) -> int:
    """Create the file; return 0."""
    from diloco.private_files import create_private
    from diloco.transport import new_secret

    path = parse_options(SecretOptions, "secret", DESCRIPTION, arguments).file
    try:
        create_private(path, f"{new_secret()}\n".encode())
    except FileExistsError as error:
        raise ConfigurationError(f"{path} exists. Choose another name, or remove it first.") from error
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written: {error}.") from error
    print(f"diloco: wrote a new secret to {path}. Copy it to every machine of the run with its mode kept (scp -p), and")
    print("pass it as --secret-file.")
    return 0
