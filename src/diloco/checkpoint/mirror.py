"""Copies of a run's checkpoints at another place, such as a bucket: uploaded while it trains, fetched to resume it.

The place is a URL for `fsspec`, or a path. It needs only what object stores can do: nothing there is ever renamed, and
no file of an upload is ever written twice.

::

    URL/
      writer.json                             who uploads; a process that finds another one here stops
      checkpoints/
        00000007-step-00001000-0f3b2a91/      the seventh upload; the last part is random: no two writers share a folder
          NAME.json, NAME.safetensors         the files of the checkpoint
          home/config.toml, ...               the files of the run folder beside its checkpoints
          manifest.json                       uploaded last; the upload is whole if all files in it have their sizes
      replica-1/...                           the same of replica 1, if that is a process of its own
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from diloco.checkpoint.disk import check_content, new_folder, write_whole
from diloco.checkpoint.reading import MANIFEST, Manifest, list_checkpoints, parse_manifest, write_manifest
from diloco.errors import CheckpointError, ConfigurationError, DiLoCoError, from_extra
from diloco.private_files import check_url, make_private_folder, open_store
from diloco.units import diff
from diloco.waiting import waiting_for

_WRITER, _HOME = "writer.json", "home/"
_MAX_MANIFEST_BYTES = 64 << 20
_CONFIG = "config.toml"
_COPIED = re.compile(
    r"config\.toml|(environment|summary|tokenizer|tokenizer_config|generation_config|special_tokens_map|added_tokens)\.json"
    r"|metrics\.jsonl|lineage(-[0-9a-f]{8})?\.jsonl|chat_template\.jinja"
)
"""The files that a run writes into its folder and that are copied: no key, no lock, and nothing of the user's."""
_REPLICA = re.compile(r"replica-([1-9]\d*)")
_UPLOADED = re.compile(
    r"/?(?:(?P<replica>replica-[1-9]\d*)/)?checkpoints/(?P<folder>\d{8}-(?P<name>step-\d{8,})-[0-9a-f]{8})/(?P<file>.+)"
)


@dataclass(frozen=True)
class _Upload:
    """One upload as the listing shows it, whole or not."""

    replica: str  # "", or the folder of a replica in a process of its own
    folder: str  # its path at the place
    name: str  # of the checkpoint
    sizes: dict[str, int] = field(default_factory=dict)  # by file name


class _Place:
    """The place that a URL names."""

    def __init__(self, url: str) -> None:
        from fsspec.core import split_protocol
        from fsspec.implementations.dirfs import DirFileSystem

        check_url(url)
        self.url = url.rstrip("/")
        local = split_protocol(url)[0] in (None, "file", "local")
        with from_extra("cloud", f"{url} needs a library"):
            try:
                fs, root = open_store(self.url, **({"auto_mkdir": True} if local else {}))
                self.store = DirFileSystem(root, fs)
            except ImportError:
                raise
            except Exception as error:  # stores that need other arguments, or connect, have no common type
                raise ConfigurationError(f"{url} can't be used: {error}. Use a path, s3://, gs:// or hf://.") from error

    @contextmanager
    def reached(self, what: str) -> Iterator[None]:
        """Turn whatever the library of the store raises in the block, which has no common type, into one error."""
        try:
            yield
        except DiLoCoError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise CheckpointError(f"{self.url} can't be {what}: {why}") from error

    def sizes(self) -> dict[str, int]:
        """Return the size of every file there, by name."""
        self.store.invalidate_cache()
        try:
            listing = self.store.find("", detail=True)
        except FileNotFoundError:
            return {}
        return {name.lstrip("/"): each["size"] for name, each in listing.items() if each["type"] == "file"}

    def uploads(self) -> dict[str, list[_Upload]]:
        """Return all uploads by replica, the newest first."""
        folders: dict[str, _Upload] = {}
        for path, size in self.sizes().items():
            if match := _UPLOADED.fullmatch(path):
                folder = path.removesuffix(f"/{match['file']}")
                upload = folders.setdefault(folder, _Upload(match["replica"] or "", folder, match["name"]))
                upload.sizes[match["file"]] = size
        by_replica: dict[str, list[_Upload]] = {}
        for folder in sorted(folders, reverse=True):
            by_replica.setdefault(folders[folder].replica, []).append(folders[folder])
        return by_replica

    def run_files(self, upload: _Upload) -> dict[str, bytes]:
        """Return the files of the run folder in an upload by name; read once, as what is there may change."""
        names = [file.removeprefix(_HOME) for file in upload.sizes if file.startswith(_HOME)]
        return {
            name: self.store.cat_file(f"{upload.folder}/{_HOME}{name}") for name in filter(_COPIED.fullmatch, names)
        }

    def read(self, upload: _Upload) -> Manifest | None:
        """Return the manifest of an upload, or None if it is not whole."""
        path = f"{upload.folder}/{MANIFEST}"
        if not 0 < upload.sizes.get(MANIFEST, 0) <= _MAX_MANIFEST_BYTES:
            return None
        try:
            manifest = parse_manifest(self.store.cat_file(path), path)
        except (CheckpointError, FileNotFoundError):  # damaged, or deleted since
            return None
        files = [item for entries in manifest.parts.values() for item in entries.items()]
        whole = all(upload.sizes.get(name) == facts.size_bytes for name, facts in files)
        return manifest if whole and upload.name == f"step-{manifest.step:08d}" else None


class Mirror:
    """Uploads the checkpoints of one run folder in a thread, one at a time, and deletes the oldest ones there.

    Args:
        url: where to; another run folder must have another place.
        home: the run folder.
        keep: how many whole checkpoints to keep there.
    """

    def __init__(self, url: str, home: Path, keep: int) -> None:
        self._place, self._home, self._keep = _Place(url), home, keep
        about = {"token": secrets.token_hex(16), "host": socket.gethostname(), "pid": os.getpid()}
        self._writer, self._number = json.dumps(about).encode(), 0
        self._thread = ThreadPoolExecutor(1, "diloco-mirror")
        self._last, self._work = home, Future[None]()  # what was offered last, and its upload
        self._work.set_result(None)
        self.sentences: list[str] = []
        """Sentences for the user about what has failed, which the caller removes."""

    def claim(self, identity: Mapping[str, str], *, fresh: bool) -> None:
        """Become the writer of the place, before the first step.

        Args:
            identity: what the run is; see `diloco.train.description`.
            fresh: whether the run begins, so that the place must not have any checkpoint.

        Raises:
            CheckpointError: it can't be written to, or read.
            ConfigurationError: there is another run.
        """
        place = self._place
        with place.reached("written to"):
            manifest = next(filter(None, map(place.read, self._own())), None)
            there = {} if manifest is None else manifest.about.get("identity", {})
            if there and (words := diff(there, identity, place.url, "this run", ("model", "data", "seed"))):
                raise ConfigurationError(f"{words}. Use another place.")
            for written in (False, True):  # the first listing may be empty because nothing may be listed
                sizes = place.sizes()
                if fresh and any(name.endswith(f"/{MANIFEST}") for name in sizes):
                    why = f"{place.url} has the checkpoints of a run already"
                    raise ConfigurationError(f"{why}: use --resume-or-start to continue it, or another place.")
                if not written:
                    place.store.pipe_file(_WRITER, self._writer)
                elif _WRITER not in sizes:
                    raise CheckpointError(f"{place.url} does not list what was written to it, so it can't be used.")
        self._number = max((int(each.folder.rpartition("/")[2][:8]) for each in self._own()), default=0)

    def offer(self, path: Path) -> None:
        """Upload the complete checkpoint ``path`` after the one that is being uploaded, in place of one that waits.

        Its files are opened now, so they may be deleted meanwhile. If that fails, it counts as an upload that fails.
        """
        self._work.cancel()
        files: dict[str, BinaryIO] = {}
        problem: OSError | None = None
        with ExitStack() as stack:
            try:
                home = [each for each in self._home.iterdir() if _COPIED.fullmatch(each.name) and each.is_file()]
                named = {f"{_HOME}{each.name}": each for each in home} | {each.name: each for each in path.iterdir()}
                for name, file in named.items():
                    files[name] = stack.enter_context(open(file, "rb"))
            except OSError as error:
                problem = error
            opened = stack.pop_all()
        self._last, self._work = path, self._thread.submit(self._upload, path.name, files, problem)
        self._work.add_done_callback(lambda _: opened.close())

    def close(self) -> None:
        """Wait until the last checkpoint is uploaded; if that fails, try once more.

        Raises:
            CheckpointError: it is not there.
        """
        for last_try in (False, True):
            with waiting_for(lambda: f"{self._last} to be uploaded to {self._place.url}"):
                error = self._work.exception()
            if error is None:
                return
            if last_try:
                raise CheckpointError(f"{error} {self._last} is complete on this machine.") from error
            self.offer(self._last)

    def _upload(self, name: str, files: Mapping[str, BinaryIO], problem: OSError | None) -> None:
        place, folder = self._place, f"checkpoints/{self._number + 1:08d}-{name}-{secrets.token_hex(4)}"
        try:
            if problem is not None:
                raise CheckpointError(f"It can't be read: {problem}.") from problem
            with place.reached("written to"):
                self._check_writer()
                for file in sorted(files, key=lambda file: file == MANIFEST):
                    if file == MANIFEST:
                        self._check_writer()
                    with place.store.open(f"{folder}/{file}", "wb") as there:
                        shutil.copyfileobj(files[file], there, 16 << 20)
        except DiLoCoError as error:
            with suppress(Exception):  # what was written may be what fills the place
                place.store.rm(folder, recursive=True)
            self.sentences.append(f"{name} was not uploaded, which is tried again with the next: {error}")
            raise
        self._number += 1
        try:
            with place.reached("deleted from"):
                self._delete_old(folder)
        except DiLoCoError as error:
            self.sentences.append(f"{name} was uploaded, but the oldest ones stay: {error}")

    def _check_writer(self) -> None:
        self._place.store.invalidate_cache()
        if (other := self._place.store.cat_file(_WRITER)) != self._writer:
            who = other[:300].decode(errors="replace")
            raise CheckpointError(f"{self._place.url} is now written to by another process, {who}.")

    def _delete_old(self, newest: str) -> None:
        uploads = self._own()
        kept = [each for each in uploads if MANIFEST in each.sizes][: self._keep]
        for upload in uploads:
            if upload not in kept and upload.folder < newest:
                if MANIFEST in upload.sizes:
                    self._place.store.rm_file(f"{upload.folder}/{MANIFEST}")  # first, so that it is never half
                self._place.store.rm(upload.folder, recursive=True)

    def _own(self) -> list[_Upload]:
        return self._place.uploads().get("", [])


def fetch_run(
    url: str, folder: Path, replica: int | None = None, check: Callable[[Path], None] = lambda settings: None
) -> bool:
    """Fetch the newest whole checkpoint of a run into ``folder``, unless that has it or a newer one.

    If replicas are processes of their own, it is the newest one that all of them have.

    Args:
        folder: the run folder; it gets the settings and the tokeniser as well.
        replica: fetch only what this replica needs. None: the checkpoints of all replicas.
        check: gets a copy of the settings before anything is written, and raises if they are refused.

    Returns:
        Whether there is anything. If not, nothing was written.

    Raises:
        CheckpointError: there are checkpoints, but none is whole or none is common to all replicas, or what was fetched
            differs from what was uploaded; or the place can't be read.
    """
    place = _Place(url)
    with place.reached("read"), waiting_for(lambda: f"a checkpoint from {url}"):
        uploads = place.uploads()
        if not any(MANIFEST in each.sizes for group in uploads.values() for each in group):
            return False
        chosen = _newest(place, uploads)
        own = f"replica-{replica}"
        if replica is not None:
            chosen = {own: chosen[own]} if own in chosen else {"": chosen[""]}
        homes = {home: place.run_files(upload) for home, (upload, _) in chosen.items()}
        for files in homes.values():
            if _CONFIG in files:
                with tempfile.TemporaryDirectory(prefix="diloco-") as beside:
                    Path(beside, _CONFIG).write_bytes(files[_CONFIG])
                    check(Path(beside, _CONFIG))
        for home, (upload, manifest) in chosen.items():
            _fetch(place, upload, manifest, folder / home, homes[home])
    return True


def _newest(place: _Place, uploads: Mapping[str, list[_Upload]]) -> dict[str, tuple[_Upload, Manifest]]:
    """Return the newest upload of each replica's state, all of the same step; "" is the run folder of replica 0."""

    def state(manifest: Manifest) -> tuple[int, object]:
        return manifest.step, manifest.about.get("global_params_digest")

    whole = {
        replica: [(each, manifest) for each in group if (manifest := place.read(each))]
        for replica, group in uploads.items()
    }
    for first, manifest in whole.get("", []):
        number = int(manifest.about.get("num_replicas", 1))
        chosen = {"": (first, manifest)}
        for replica in filter(None, whole.keys() - manifest.parts.keys()):
            same = [each for each in whole[replica] if state(each[1]) == state(manifest)]
            chosen |= {replica: same[0]} if same and int(replica[8:]) < number else {}
        inside = [match for match in map(_REPLICA.fullmatch, manifest.parts) if match and int(match[1]) < number]
        if manifest.about.get("elastic") or len(chosen) + len(inside) == number:
            return chosen
    steps = {replica or "replica-0": sorted({m.step for _, m in whole[replica]}) for replica in sorted(whole)}
    raise CheckpointError(
        f"{place.url} has no whole checkpoint that all replicas have. Steps: {steps}. To use one of them all the same, "
        "fetch it with another program, and resume from its folder."
    )


def _fetch(place: _Place, upload: _Upload, manifest: Manifest, home: Path, run_files: Mapping[str, bytes]) -> None:
    target = home / "checkpoints" / upload.name
    before = list_checkpoints(target.parent)
    newer = bool(before) and before[-1].serial > manifest.serial  # and not uploaded
    if any(vars(each) == vars(manifest) | {"path": target} for each in before):
        return  # without a change: a run may be training here, which is found out later
    make_private_folder(home)
    with new_folder(target, replaces=target.exists()) as partial:
        for files in manifest.parts.values():
            for name, facts in files.items():
                place.store.get_file(f"{upload.folder}/{name}", str(partial / name))
                check_content(partial / name, facts)
        write_manifest(partial, manifest)
        for name, content in run_files.items():
            if not newer and not (name == "metrics.jsonl" and (home / name).exists()):
                write_whole(home / name, content)
