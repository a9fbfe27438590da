"""Picture files: a check of the path, the style, and writing SVG, PNG and HTML."""

from __future__ import annotations

import html
import importlib.util
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.checkpoint import write_whole
from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SUFFIXES", "check_picture_path", "picture_style", "write_picture"]

SUFFIXES = (".svg", ".png", ".html")

STYLE = {
    "svg.hashsalt": "diloco",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "savefig.dpi": 150,
}


def check_picture_path(path: Path) -> None:
    """Check that a picture can be written to ``path``; callers do this before anything is computed.

    Raises:
        ConfigurationError: for a suffix other than .svg, .png and .html, if the folder is missing, if ``path`` is a
            folder, or if matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigurationError(
            f"the name of the picture {path} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}."
        )
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigurationError(f"the picture {path} cannot be written: {reason}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            f"the picture {path} needs matplotlib, which is not installed: pip install 'diloco[plots]'."
        )


@contextmanager
def picture_style() -> Iterator[None]:
    """Apply the style of this package inside the ``with`` block, regardless of any matplotlibrc."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def write_picture(figure: Figure, path: Path, names: Mapping[str, str], title: str) -> None:
    """Write ``figure`` to ``path`` atomically. Call this inside `picture_style`.

    Args:
        figure: a figure drawn inside `picture_style`.
        path: the file; its suffix selects the format.
        names: a description of each part of the figure, by its ``gid`` ("part-" and a number).
    """
    stream = io.BytesIO()
    if path.suffix == ".png":
        figure.savefig(stream, format="png", metadata={"Software": None})
        content = stream.getvalue()
    else:
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
        svg = _with_names(stream.getvalue().decode(), names)
        content = (svg if path.suffix == ".svg" else _page(svg, title)).encode()
    write_whole(path, content)


def _with_names(svg: str, names: Mapping[str, str]) -> str:
    """Add a title with its description to each named part; browsers show it as a tooltip."""

    def named(opening: re.Match[str]) -> str:
        return f"{opening[0]}<title>{html.escape(names[opening[1]])}</title>"

    return re.sub(r'<g id="(part-\d+)">', named, svg)


def _page(svg: str, title: str) -> str:
    """Return an HTML page with the picture, a slider for its size, and rules for printing."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title>
<style>
:root {{ color-scheme: light; }}
body {{ margin: 0; background: #fff; color: #111; font: 14px sans-serif; }}
#bar {{ padding: 8px 12px; }}
#bar input {{ width: 220px; vertical-align: middle; }}
#view {{ overflow: auto; }}
#view svg {{ display: block; height: auto; }}
#view text {{ pointer-events: none; }}
#view g[id^="part-"]:hover > path {{ stroke: #000 !important; stroke-width: 2 !important; }}
@media print {{ #bar {{ display: none; }} #view {{ overflow: visible; }} #view svg {{ width: 100% !important; }} }}
</style>
</head>
<body>
<div id="bar"><label>Size <input id="size" type="range" min="-1" max="4" step="0.05" value="0"></label>
Point at a part to see what it is.</div>
<div id="view">
{svg[svg.index("<svg") :]}</div>
<script>
const view = document.getElementById("view"), picture = view.querySelector("svg");
const natural = picture.getBoundingClientRect().width;
document.getElementById("size").addEventListener("input", event => {{
  const middle = (view.scrollLeft + view.clientWidth / 2) / view.scrollWidth;
  picture.style.width = natural * 2 ** event.target.value + "px";
  view.scrollLeft = middle * view.scrollWidth - view.clientWidth / 2;
}});
</script>
</body>
</html>
"""
