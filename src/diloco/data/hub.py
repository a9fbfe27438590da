"""Data sets of the ``datasets`` library: of the Hugging Face hub, of local folders, and of its loaders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from diloco.data.settings import HUB_PREFIX, SourceSettings
from diloco.errors import ConfigurationError, DataError, from_extra, nearest
from diloco.waiting import fetching

__all__ = ["as_data_error", "open_data_set", "parquet_rows", "rows_of"]


def _parsed(text: str) -> tuple[str, str | None, str | None]:
    """Return path, config and split of ``hf:NAME[/CONFIG][:SPLIT]``; a missing config or split is None.

    >>> _parsed("hf:allenai/c4/en:validation"), _parsed("hf:imdb:train[:10%]")
    (('allenai/c4', 'en', 'validation'), ('imdb', None, 'train[:10%]'))
    """
    place, _, split = text.removeprefix(HUB_PREFIX).partition(":")
    if place and Path(place).expanduser().exists():
        return place, None, split or None
    parts = place.split("/")
    if not all(parts) or len(parts) > 3 or parts[0] in (".", "..", "~"):
        raise ConfigurationError(
            f"{text!r} is neither the name of a data set, hf:NAME[/CONFIG][:SPLIT] as in hf:allenai/c4/en:train, nor "
            "an existing folder."
        )
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or None


def open_data_set(place: str, settings: SourceSettings) -> Any:
    """Open the text of ``hf:NAME[/CONFIG][:SPLIT]`` as a ``datasets.IterableDataset``; nothing is read yet."""
    path, config, split = _parsed(place)
    column, folder = settings.text_field, Path(path).expanduser()
    if path == "pandas":
        raise ConfigurationError(f"{place} reads pickles, which could run any code. Convert them to Parquet.")
    with from_extra("hf", f"{place} needs datasets"):
        import datasets
    with _reading(place):
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():  # written by save_to_disk
            rows = _split_of(datasets.load_from_disk(str(folder)), split)
        else:
            files = {"data_files": list(settings.data_files) or None, "streaming": settings.streaming}
            with fetching(path) if "/" in path else nullcontext():  # otherwise a loader of local files
                name = str(folder) if folder.exists() else path
                rows = datasets.load_dataset(name, config, split=split or "train", trust_remote_code=False, **files)
        if (known := rows.column_names) is not None:  # unknown for some streams
            if column not in known:
                raise DataError(f"{place} has no field {column!r} (data.sources); {nearest(column, known)}")
            rows = rows.select_columns([column])
        return rows.to_iterable_dataset() if isinstance(rows, datasets.Dataset) else rows


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a Parquet file, as `rows_of` does."""
    with from_extra("hf", f"{path} needs datasets"):
        import datasets  # noqa: F401  # the extra installs pyarrow with it
        from pyarrow.parquet import ParquetFile
    with _reading(str(path)), ParquetFile(path) as file:
        rows = (row for batch in file.iter_batches(1024) for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{path}, row {number}", row


def rows_of(data_set: Any, place: str, *, first: int = 0, size: int = 100) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a data set, the next one being number ``first``. Its state is exact after each ``size``."""
    row = first
    with _reading(place):
        batches = data_set.iter(size)
    while True:
        with _reading(place):
            batch = next(batches, None)
        if batch is None:
            return
        for values in zip(*batch.values(), strict=True):
            yield f"{place}, row {row}", dict(zip(batch, values, strict=True))
            row += 1


def _split_of(loaded: Any, split: str | None) -> Any:
    """Return the split, or the part of it, of what ``save_to_disk`` wrote; the whole of a data set without splits."""
    import datasets

    parts = loaded if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}
    if split is None and parts is not loaded:
        return loaded
    spans = datasets.ReadInstruction.from_spec(split or "train").to_absolute({name: len(parts[name]) for name in parts})
    return datasets.concatenate_datasets([parts[each.splitname].select(range(each.from_, each.to)) for each in spans])


@contextmanager
def as_data_error(what: str, advice: str) -> Iterator[None]:
    """Turn any error of datasets or transformers, of which there are many types, into a `DataError`."""
    try:
        yield
    except (DataError, ConfigurationError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if "trust_remote_code" in reason:
            raise DataError(f"{what} is code of its own, which is not run. Use another.") from error
        hub = "and the connection to the hub (HF_HUB_OFFLINE=1 disables it)"
        raise DataError(f"{what} cannot be read: {reason} {advice}, {hub}.") from error


def _reading(place: str) -> AbstractContextManager[None]:
    return as_data_error(place, "Check the name, config (hf:NAME/CONFIG) and split (:SPLIT)")
