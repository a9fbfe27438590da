"""Which version of the package was measured."""

import subprocess
from pathlib import Path


def commit_of(python: Path) -> str:
    """Return the commit of the checkout whose package an interpreter imports."""
    code = "import pathlib, diloco; print(pathlib.Path(diloco.__file__).parent)"
    folder = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    asked = ["git", "-C", folder, "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
