"""What the site shows that is not in docs/: the README as its first page and the benchmarks' reports."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add a page for the README and for the reports of each benchmark."""
    for path in [_ROOT / "README.md", *sorted(_ROOT.glob("benchmarks/**/*.md"))]:
        content = _with_links(path, _fenced(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, _page_of(path) or "", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links that leave docs/ lead to where the site has those pages."""
    source = page.file.abs_src_path
    return _with_links(Path(source), _fenced(markdown)) if source else markdown


def _fenced(markdown: str) -> str:
    """With doctests that stand in the text as blocks of code."""
    lines: list[str] = []
    inside = doctest = False
    for line in markdown.splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside and not doctest and line.startswith(">>> "):
            lines.append("```python")
            doctest = True
        elif doctest and not line.strip():
            lines.append("```")
            doctest = False
        lines.append(line)
    return "\n".join([*lines, "```"] if doctest else lines)


def _with_links(path: Path, markdown: str) -> str:
    """``markdown`` of ``path``, with its links to files of the repository as links to pages, or as their names."""
    here = posixpath.dirname(_page_of(path) or "")

    def led(link: re.Match[str]) -> str:
        target = (path.parent / link[2]).resolve()
        if not target.is_relative_to(_ROOT) or not target.exists():
            return link[0]  # left for the strict build to find
        page = _page_of(target)
        if page is None:
            name = str(target.relative_to(_ROOT))
            return f"`{name}`" if link[1].strip("`/") == name else f"{link[1]} (`{name}`)"
        return f"[{link[1]}]({posixpath.relpath(page, here or '.')}{link[3] or ''})"

    return _LINK.sub(led, markdown)


def _page_of(path: Path) -> str | None:
    """Which page of the site, or picture, a file or folder of the repository is; None: none."""
    name = path.relative_to(_ROOT)
    if path.is_dir() and (path / "README.md").exists():
        name /= "README.md"
    if name == Path("README.md"):
        return "index.md"
    if name.parts[0] == "docs" and name.suffix in (".md", ".svg", ".png"):
        return posixpath.join(*name.parts[1:])
    if name.parts[0] != "benchmarks" or name.suffix != ".md" or len(name.parts) > 3:
        return None
    if len(name.parts) == 2:
        return f"measured/{name.name.replace('README', 'index')}"
    return f"measured/{name.parts[1]}.md" if name.name == "README.md" else f"measured/{name.parts[1]}-{name.name}"
