"""The public interface of the package."""

import re
import subprocess
import sys
from pathlib import Path

import diloco

ROOT = Path(__file__).parent.parent


def test_every_public_name_loads_and_is_documented() -> None:
    for name in diloco.__all__:
        value = getattr(diloco, name)
        assert name == "__version__" or (value.__doc__ or "").strip(), name
    assert sorted(diloco.__all__) == list(diloco.__all__)


def test_the_reference_has_every_public_name_where_it_lives() -> None:
    reference = (ROOT / "docs" / "site" / "reference.md").read_text(encoding="utf-8")
    for name in set(diloco.__all__) - {"__version__"}:
        value = getattr(diloco, name)
        assert f"::: {value.__module__}.{name}\n" in reference or value.__module__ == "diloco.errors", name


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, diloco; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_changelog_version_and_project_agree() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r"^## (\d\S*)", changelog, re.MULTILINE).group(1) == diloco.__version__  # type: ignore[union-attr]  # fails
    assert f'version = "{diloco.__version__}"' in project
