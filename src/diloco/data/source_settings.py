"""Where the documents of each source come from, as the settings say it. No heavy imports here."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.errors import ConfigurationError, nearest

__all__ = ["HUB_PREFIX", "HubName", "SourceSettings", "absolute_place", "absolute_sources", "parse_sources"]

HUB_PREFIX = "hf:"
"""Begins what is read by the ``datasets`` library, or is a tokenizer of the Hugging Face hub."""

_OF_HUB = ("config", "split", "data_files")
_TEXTS = ("text_field", "document_separator", "config", "split", "data_files")


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """One source: what is read, and how much of it.

    Attributes:
        name: what it is called in reports; "" where it is the only one.
        data: files, folders and ``hf:`` names, one after the other; none: the standard library.
        weight: its fraction of the tokens drawn is this over the sum of all weights.
        text_field: the field of records that holds the text.
        document_separator: where a text file is cut into documents.
        config: of a data set of several, for ``hf:`` names.
        split: of a data set, such as "train" or "train[:10%]"; None: what follows the name, else "train".
        data_files: files of a data set, or patterns, for ``hf:`` names.
        streaming: read a data set record by record, without a copy of it on the disk.
    """

    name: str = ""
    data: tuple[str, ...] = ()
    weight: float = 1.0
    text_field: str = "text"
    document_separator: str | None = None
    config: str | None = None
    split: str | None = None
    data_files: tuple[str, ...] = ()
    streaming: bool = False


@dataclass(frozen=True)
class HubName:
    """What an ``hf:`` name means.

    Attributes:
        path: name on the hub, name of a loader of ``datasets`` (json, parquet, text, csv, arrow), or a local folder.
        config: of a data set of several, or None.
        split: or None.

    >>> HubName.parse("hf:allenai/c4/en:validation")
    HubName(path='allenai/c4', config='en', split='validation')
    >>> HubName.parse("hf:imdb:train[:10%]")
    HubName(path='imdb', config=None, split='train[:10%]')
    """

    path: str
    config: str | None
    split: str | None

    @classmethod
    def parse(cls, text: str) -> HubName:
        """From ``hf:NAME[/CONFIG][:SPLIT]``, where NAME is ORGANISATION/NAME, one word, or a path that exists.

        Raises:
            ConfigurationError: anything else.
        """
        place, _, split = text.removeprefix(HUB_PREFIX).partition(":")
        if place and Path(place).expanduser().exists():
            return cls(place, None, split or None)
        parts = place.split("/")
        if not all(parts) or len(parts) > 3 or parts[0] in (".", "..", "~"):
            raise ConfigurationError(
                f"{text!r} was given; hf:NAME[/CONFIG][:SPLIT] with the name of a data set on the hub, such as "
                "hf:allenai/c4/en:train, or with a folder that exists, would work. Nothing was started."
            )
        return cls("/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or None)


def parse_sources(
    paths: Sequence[Path],
    sources: Mapping[str, Any],
    *,
    text_field: str,
    document_separator: str | None,
    streaming: bool,
) -> tuple[SourceSettings, ...]:
    """The sources that ``data.paths`` or ``data.sources`` name.

    Raises:
        ConfigurationError: both were given, or a table is malformed.

    >>> tables = {"web": {"data": "web/", "weight": 2}, "code": {"data": ["a/", "b/"]}}
    >>> web, code = parse_sources((), tables, text_field="text", document_separator=None, streaming=False)
    >>> (web.data, web.weight), (code.data, code.weight)
    ((('web/',), 2.0), (('a/', 'b/'), 1.0))
    """
    common = SourceSettings(text_field=text_field, document_separator=document_separator, streaming=streaming)
    if not sources:
        return (dataclasses.replace(common, data=tuple(map(str, paths))),)
    if paths:
        raise ConfigurationError(
            f"data.paths={[str(path) for path in paths]} and data.sources were both given; all of it as data.sources, "
            "or data.paths alone, would work. Nothing was started."
        )
    return tuple(_parse(name, table, common) for name, table in sources.items())


def _parse(name: str, table: Any, common: SourceSettings) -> SourceSettings:
    where = f"data.sources.{name}"
    if not isinstance(table, Mapping):
        raise _wrong(where, table, 'a table such as { data = "folder/", weight = 0.5 }')
    known = {field.name for field in dataclasses.fields(SourceSettings)} - {"name"}
    values: dict[str, Any] = {"name": name}
    for key, value in table.items():
        if key not in known:
            raise ConfigurationError(f"{where} has the key {key!r}; {nearest(key, known)} Nothing was started.")
        values[key] = _checked(f"{where}.{key}", key, value)
    if not values.get("data"):
        raise _wrong(where, dict(table), 'data = "folder/", or a list of files, folders and hf: names,')
    of_hub = [key for key in _OF_HUB if key in values]
    if of_hub and not any(place.startswith(HUB_PREFIX) for place in values["data"]):
        raise ConfigurationError(
            f"{where} has {', '.join(of_hub)}, for what the datasets library reads, and its data are "
            f"{', '.join(values['data'])}; without, or with an hf: name, it would work. Nothing was started."
        )
    return dataclasses.replace(common, **values)


def _checked(where: str, key: str, value: Any) -> Any:
    if key in ("data", "data_files"):
        listed = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
        if listed and all(isinstance(each, str) for each in listed):
            return listed
        raise _wrong(where, value, "text, or a list of it,")
    if key == "weight":
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
            return float(value)
        raise _wrong(where, value, "a positive number")
    if key == "streaming":
        if isinstance(value, bool):
            return value
        raise _wrong(where, value, "true or false")
    if isinstance(value, str) and key in _TEXTS and value:
        return value
    raise _wrong(where, value, "text")


def _wrong(where: str, value: Any, works: str) -> ConfigurationError:
    return ConfigurationError(f"{where} = {value!r} was given; {works} would work. Nothing was started.")


def absolute_place(text: str) -> str:
    """A file, folder or ``hf:`` name that means the same from another working directory."""
    if not text.startswith(HUB_PREFIX):
        return os.path.abspath(os.path.expanduser(text))
    place, colon, split = text.removeprefix(HUB_PREFIX).partition(":")
    if place and Path(place).expanduser().exists():
        return f"{HUB_PREFIX}{os.path.abspath(os.path.expanduser(place))}{colon}{split}"
    return text


def absolute_sources(sources: Mapping[str, Any]) -> dict[str, Any]:
    """``data.sources`` with every place absolute; malformed tables as they are, to be refused later."""
    result: dict[str, Any] = {}
    for name, table in sources.items():
        result[name] = table
        if not isinstance(table, Mapping):
            continue
        places = {}
        for key in ("data", "data_files"):
            value = table.get(key)
            if isinstance(value, str):
                places[key] = _absolute_file(value) if key == "data_files" else absolute_place(value)
            elif isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
                make = _absolute_file if key == "data_files" else absolute_place
                places[key] = tuple(map(make, value))  # type: ignore[assignment]  # text or a tuple of it
        result[name] = {**table, **places}
    return result


def _absolute_file(text: str) -> str:
    """A pattern of local files, absolute; one with a protocol, or of a data set on the hub, as it is."""
    folder = text.split("*", 1)[0].rpartition("/")[0]
    local = "://" not in text and (Path(text).exists() or (bool(folder) and Path(folder).is_dir()))
    return os.path.abspath(text) if local else text
