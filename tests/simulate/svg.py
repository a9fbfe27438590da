"""Readers of the texts and positions in a drawn picture."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def texts(path: Path) -> list[str]:
    """Return all visible texts in a picture, without the tooltips."""
    return ["".join(node.itertext()).strip() for node in ElementTree.parse(path).iter(f"{SVG}text")]


def names(path: Path) -> list[str]:
    """Return the tooltips of a picture."""
    return [node.text or "" for node in ElementTree.parse(path).iter(f"{SVG}title")]


def boxes(path: Path) -> dict[str, tuple[float, float, float]]:
    """Return the left edge, right edge and top of each span of a drawn timeline in points, by its tooltip."""
    found = {}
    for node in ElementTree.parse(path).iter(f"{SVG}g"):
        if node.get("id", "").startswith("part-"):
            shape = node.find(f"{SVG}path")
            numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*", shape.get("d", ""))]  # type: ignore[union-attr]
            title = node.find(f"{SVG}title")
            found[title.text or ""] = (min(numbers[::2]), max(numbers[::2]), min(numbers[1::2]))  # type: ignore[union-attr]
    return found
