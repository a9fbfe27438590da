"""The page as one text: for the server, which sends its parts by themselves, and as a file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from diloco.errors import ConfigurationError

__all__ = ["export_page", "live_page", "part", "plotly_script"]

_EXPORTED = (
    "default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


def part(name: str) -> str:
    """A file of the page: ``watch.html``, ``watch.css`` or ``watch.js``."""
    return (files("diloco.watch") / "page" / name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """plotly.js, from the Python package that ships it.

    Raises:
        ConfigurationError: if plotly is not installed.
    """
    try:
        return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except (ImportError, OSError) as error:
        raise ConfigurationError(
            f"`diloco watch` needs plotly, which can't be found ({error}): pip install 'diloco[watch]'. Nothing was "
            "started."
        ) from error


def live_page() -> str:
    """The page that a server sends; its script fetches the rest from there."""
    return (
        part("watch.html")
        .replace("<!-- head -->", '<link rel="stylesheet" href="watch.css">')
        .replace(
            "<!-- scripts -->",
            '<script src="watch.js" defer></script>\n<script src="plotly.js" id="plotly" defer></script>',
        )
    )


def export_page(data: Mapping[str, Any]) -> str:
    """The page with ``data`` in it, in one file that opens anywhere and loads nothing.

    >>> page = export_page({"runs": {"0": {"name": "</script><script>alert(1)</script>"}}})
    >>> "</script><script>alert" in page
    False
    """
    # no "<" can end the element that holds the data, whatever stands in a sample
    held = json.dumps(data, allow_nan=False, ensure_ascii=True).replace("<", "\\u003c")
    scripts = [part("watch.js"), plotly_script().replace("</script", "<\\/script")]
    hashes = " ".join(f"'sha256-{_sha256(each)}'" for each in scripts)
    policy = _EXPORTED.format(hashes=hashes)
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>\n{part("watch.css")}</style>'
    body = f'<script type="application/json" id="data">{held}</script>\n'
    body += "\n".join(f"<script>{each}</script>" for each in reversed(scripts))
    return part("watch.html").replace("<!-- head -->", head).replace("<!-- scripts -->", body)


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
