"""The HTML of the page: as the server sends it, with separate parts, and as one self-contained file."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from diloco.errors import ConfigurationError

__all__ = ["export_page", "live_page", "part", "plotly_script"]

_EXPORTED = (
    "default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


def part(name: str) -> str:
    """Return the content of ``watch.html``, ``watch.css`` or ``watch.js``."""
    return (files("diloco.watch") / "page" / name).read_text(encoding="utf-8")


def plotly_script() -> Path:
    """Return the path of plotly.js in the Python package plotly, which is not imported.

    Raises:
        ConfigurationError: if plotly is not installed.
    """
    package = importlib.util.find_spec("plotly")
    script = Path(package.origin if package and package.origin else "").parent / "package_data" / "plotly.min.js"
    if not script.is_file():
        raise ConfigurationError(
            "`diloco watch` needs plotly, which is not installed or incomplete. Install it with: pip install "
            "'diloco[watch]'."
        )
    return script


def live_page() -> str:
    """Return the page that a server sends. Its script fetches the data from the server."""
    return (
        part("watch.html")
        .replace("<!-- head -->", '<link rel="stylesheet" href="watch.css">')
        .replace(
            "<!-- scripts -->",
            '<script src="watch.js" defer></script>\n<script src="plotly.js" id="plotly" defer></script>',
        )
    )


def export_page(data: Mapping[str, Any]) -> str:
    """Return the page with ``data`` in it, as one HTML file that loads nothing else.

    >>> page = export_page({"runs": {"0": {"name": "</script><script>alert(1)</script>"}}})
    >>> "</script><script>alert" in page
    False
    """
    # without "<", no text in the data, such as a sample, can end the element that holds it
    held = json.dumps(data, allow_nan=False, ensure_ascii=True).replace("<", "\\u003c")
    plotly = plotly_script().read_text(encoding="utf-8")
    scripts = [part("watch.js"), plotly.replace("</script", "<\\/script")]
    hashes = " ".join(f"'sha256-{_sha256(each)}'" for each in scripts)
    policy = _EXPORTED.format(hashes=hashes)
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>\n{part("watch.css")}</style>'
    body = f'<script type="application/json" id="data">{held}</script>\n'
    body += "\n".join(f"<script>{each}</script>" for each in reversed(scripts))
    return part("watch.html").replace("<!-- head -->", head).replace("<!-- scripts -->", body)


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
