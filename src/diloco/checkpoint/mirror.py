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

Replicas resume from the newest step of which all have a whole upload. So each keeps its upload of that step until a
newer one is whole for all of them, and those of the steps that the others are uploading, beside its newest ones. What
is kept for a replica that is gone for ever are two uploads, however long the others go on.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from diloco.checkpoint.disk import check_content, new_folder, write_whole
from diloco.checkpoint.reading import LASTING, MANIFEST, Manifest, list_checkpoints, parse_manifest, write_manifest
from diloco.errors import CheckpointError, ConfigurationError, DiLoCoError, from_extra
from diloco.private_files import check_url, make_private_folder, open_store
from diloco.units import diff
from diloco.waiting import waiting_for

_WRITER, _HOME = "writer.json", "home/"
_MAX_NAMED = 300  # characters of another writer
_MAX_MANIFEST_BYTES = 64 << 20
_CONFIG, _MAX_CONFIG_BYTES = "config.toml", 1 << 20
_COPIED = re.compile(
    r"config\.toml|(environment|summary|tokenizer|tokenizer_config|generation_config|special_tokens_map|added_tokens)\.json"
    r"|metrics\.jsonl|chat_template\.jinja"
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

    @property
    def number(self) -> int:
        """Its place in the order in which the replica has uploaded."""
        return int(self.folder.rpartition("/")[2][:8])


_Whole: TypeAlias = Mapping[str, list[tuple[_Upload, Manifest]]]
"""The whole uploads of each replica, the newest first; "" is replica 0, or all replicas of one process."""

_Chosen: TypeAlias = dict[str, tuple[_Upload, Manifest]]
"""An upload of each replica, all of the same step."""


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
        return {name.lstrip("/"): entry["size"] for name, entry in listing.items() if entry["type"] == "file"}

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

    def whole(self, uploads: Mapping[str, list[_Upload]], damaged: Collection[str] = ()) -> _Whole:
        """Return the uploads that are whole as far as their sizes show, without the folders of ``damaged`` ones."""
        whole: dict[str, list[tuple[_Upload, Manifest]]] = {}
        for replica, group in uploads.items():
            whole[replica] = []
            for upload in group:
                manifest = None if upload.folder in damaged else self.read(upload)
                if manifest is not None:
                    whole[replica].append((upload, manifest))
        return whole

    def bytes_of(self, upload: _Upload, file: str, most_bytes: int) -> bytes:
        """Return the content of a small file.

        Raises:
            CheckpointError: it is larger than ``most_bytes``, or has grown since it was listed.
        """
        size, path = upload.sizes[file], f"{upload.folder}/{file}"
        data: bytes = self.store.cat_file(path, start=0, end=size + 1) if size <= most_bytes else b""
        if size > most_bytes or len(data) > size:
            why = f"has more than {most_bytes} bytes, so no run has written it" if size > most_bytes else "has grown"
            raise CheckpointError(f"{self.url}/{path} {why}.")
        return data

    def chunks_of(self, path: str) -> Iterator[bytes]:
        with self.reached("read"), self.store.open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                yield chunk

    def config(self, upload: _Upload) -> bytes | None:
        """Return the settings in an upload, or None; read once, as what is there may change."""
        name = f"{_HOME}{_CONFIG}"
        return self.bytes_of(upload, name, _MAX_CONFIG_BYTES) if name in upload.sizes else None

    def read(self, upload: _Upload) -> Manifest | None:
        """Return the manifest of an upload, or None if it is not whole."""
        manifest = self._manifest(upload)
        return manifest if manifest and _has_all_files(upload, manifest) else None

    def lost_files(self, uploads: Mapping[str, list[_Upload]]) -> bool:
        """Return whether an upload is not whole although its manifest, which is uploaded last, is there."""
        manifests = [(upload, self._manifest(upload)) for group in uploads.values() for upload in group]
        return any(manifest and not _has_all_files(upload, manifest) for upload, manifest in manifests)

    def _manifest(self, upload: _Upload) -> Manifest | None:
        if not upload.sizes.get(MANIFEST):
            return None
        try:
            return parse_manifest(self.bytes_of(upload, MANIFEST, _MAX_MANIFEST_BYTES), f"{upload.folder}/{MANIFEST}")
        except (CheckpointError, FileNotFoundError):  # damaged, or deleted since
            return None


def _has_all_files(upload: _Upload, manifest: Manifest) -> bool:
    files = [item for entries in manifest.parts.values() for item in entries.items()]
    sizes_are_right = all(upload.sizes.get(name) == facts.size_bytes for name, facts in files)
    return sizes_are_right and upload.name == f"step-{manifest.step:08d}"


class Mirror:
    """Uploads the checkpoints of one run folder in a thread, one at a time, and deletes the oldest ones there.

    Args:
        url: where to; another run must have another place.
        home: the run folder, or that of one replica.
        keep: how many whole checkpoints to keep there.
        replica: the number of the replica whose folder ``home`` is, if it is not 0.
    """

    def __init__(self, url: str, home: Path, keep: int, replica: int = 0) -> None:
        self._place, self._home, self._keep = _Place(url), home, keep
        self._replica = f"replica-{replica}" if replica else ""
        self._below = f"{self._replica}/" if replica else ""
        about = {"token": secrets.token_hex(16), "host": socket.gethostname(), "pid": os.getpid()}
        self._writer, self._number = json.dumps(about).encode(), 0
        self._thread = ThreadPoolExecutor(1, "diloco-mirror")
        self._uploading: dict[Future[None], Path] = {}
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
        place, writer = self._place, f"{self._below}{_WRITER}"
        with place.reached("written to"):
            for manifest in filter(None, map(place.read, place.uploads().get(self._replica, []))):
                there = manifest.about.get("identity", {})
                if there and (difference := diff(there, identity, place.url, "this run", (*LASTING, "seed"))):
                    raise ConfigurationError(f"{difference}. Use another place.")
                break
            for written in (False, True):  # the first listing may be empty because nothing may be listed
                uploads = place.uploads()
                if fresh and (_began(place.whole(uploads)) or place.lost_files(uploads)):
                    why = f"{place.url} has the checkpoints of a run already"
                    raise ConfigurationError(f"{why}: use --resume-or-start to continue it, or another place.")
                if not written:
                    place.store.pipe_file(writer, self._writer)
                elif writer not in place.sizes():
                    raise CheckpointError(f"{place.url} does not list what was written to it, so it can't be used.")
            self._number = max((upload.number for upload in place.uploads().get(self._replica, [])), default=0)

    def offer(self, path: Path) -> None:
        """Upload the complete checkpoint ``path`` after the one that is being uploaded, in place of one that waits.

        It must stay while it is `in_use`.
        """
        self._work.cancel()
        self._last, self._work = path, self._thread.submit(self._upload, path)
        self._uploading = {work: of for work, of in self._uploading.items() if not work.done()} | {self._work: path}

    @property
    def in_use(self) -> Collection[Path]:
        """The checkpoints that are being uploaded or wait for it."""
        return [path for work, path in self._uploading.items() if not work.done()]

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

    def _upload(self, path: Path) -> None:
        place, name = self._place, path.name
        folder = f"{self._below}checkpoints/{self._number + 1:08d}-{name}-{secrets.token_hex(4)}"
        try:
            try:
                home = [entry for entry in self._home.iterdir() if _COPIED.fullmatch(entry.name) and entry.is_file()]
                files = {f"{_HOME}{entry.name}": entry for entry in home} | {
                    entry.name: entry for entry in path.iterdir()
                }
            except OSError as error:
                raise CheckpointError(f"It can't be read: {error}.") from error
            # a small one first, as it shows the other replicas which step they have to keep
            for file in sorted(files, key=lambda file: (file == MANIFEST, file != f"{_HOME}{_CONFIG}")):
                self._upload_file(files[file], f"{folder}/{file}", check_writer=file in (f"{_HOME}{_CONFIG}", MANIFEST))
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

    def _upload_file(self, file: Path, name: str, *, check_writer: bool) -> None:
        """Upload one file; the next is opened after it, so that no number of replicas needs many open files."""
        with ExitStack() as stack:
            try:
                opened = stack.enter_context(open(file, "rb"))
            except OSError as error:
                raise CheckpointError(f"It can't be read: {error}.") from error
            stack.enter_context(self._place.reached("written to"))
            if check_writer:
                self._check_writer()
            there = stack.enter_context(self._place.store.open(name, "wb"))
            shutil.copyfileobj(opened, there, 16 << 20)

    def _check_writer(self) -> None:
        self._place.store.invalidate_cache()
        other = self._place.store.cat_file(f"{self._below}{_WRITER}", start=0, end=len(self._writer) + _MAX_NAMED)
        if other != self._writer:
            who = other[:_MAX_NAMED].decode(errors="replace")
            raise CheckpointError(f"{self._place.url} is now written to by another process, {who}.")

    def _delete_old(self, newest: str) -> None:
        uploads = self._place.uploads()
        own, kept = (
            uploads.get(self._replica, []),
            _kept(self._place.whole(uploads), uploads, self._replica, self._keep),
        )
        for upload in own:
            if upload.folder not in kept and upload.folder < newest:
                if MANIFEST in upload.sizes:
                    self._place.store.rm_file(f"{upload.folder}/{MANIFEST}")  # first, so that it is never half
                self._place.store.rm(upload.folder, recursive=True)


def _kept(whole: _Whole, uploads: Mapping[str, list[_Upload]], replica: str, keep: int) -> set[str]:
    """Return the folders of the uploads that a replica keeps: its newest ones, and what the others still need."""
    mine = [upload for upload, _ in whole.get(replica, [])]
    kept = mine[:keep]
    if common := _common(whole):
        kept += [common[replica][0]] if replica in common else []
    else:
        kept += mine[-1:]  # the first one, which shows that the run has never had a step that all have
    for other, group in uploads.items():
        if other != replica and group and group[0] not in [upload for upload, _ in whole[other]]:
            kept += [upload for upload in mine if upload.name == group[0].name][:1]  # it is being uploaded
    return {upload.folder for upload in kept}


def fetch_run(
    url: str,
    folder: Path,
    replica: int | None = None,
    check: Callable[[Path], None] = lambda settings: None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> bool:
    """Fetch the newest whole checkpoint of a run into ``folder``, unless that has it or a newer one.

    If replicas are processes of their own, it is the newest one that all of them have.

    Args:
        folder: the run folder; it gets the settings and the tokeniser as well.
        replica: fetch only what this replica needs. None: the checkpoints of all replicas.
        check: gets a copy of the settings before anything is written, and raises if they are refused.
        tell: gets sentences about what was passed over because it is damaged, or not whole for all replicas.

    Returns:
        Whether there is anything to resume from. If not, nothing was uploaded, or never a step by all replicas.

    Raises:
        CheckpointError: there were checkpoints that all replicas had, but none is left that is whole, nor is one in the
            run folder; or the place can't be read.
    """
    place = _Place(url)
    with place.reached("read"), waiting_for(lambda: f"a checkpoint from {url}"):
        uploads = place.uploads()
        if not any(MANIFEST in upload.sizes for group in uploads.values() for upload in group):
            return False
        damaged: dict[str, str] = {}  # folder of an upload -> what is wrong with it
        while True:
            whole = place.whole(uploads, damaged)
            chosen = _common(whole)
            if chosen is None:
                here = any(map(list_checkpoints, (folder / "checkpoints", *folder.glob("replica-*/checkpoints"))))
                if here or not (damaged or _began(whole) or place.lost_files(uploads)):
                    then = "The run goes on from what is in the run folder." if here else "It never had one."
                    tell(" ".join([*damaged.values(), f"{url} has {_none_common(whole)} {then}"]))
                    return here
                advice = "To use one of them anyway, copy it with another program, and resume from that folder."
                raise CheckpointError(" ".join([*damaged.values(), f"{url} has {_none_common(whole)} {advice}"]))
            own = f"replica-{replica}"
            wanted = chosen
            if replica is not None:
                wanted = {own: chosen[own]} if own in chosen else {"": chosen[""]}
            try:
                _fetch_all(place, wanted, folder, check)
                break
            except _DamagedError as error:
                damaged[error.folder] = str(error)
        local = list_checkpoints(folder / next(iter(wanted)) / "checkpoints")
        if not (local and local[-1].step > next(iter(chosen.values()))[1].step):  # which it goes on from, otherwise
            for words in _passed_over(place, uploads, whole, chosen, damaged):
                tell(words)
    return True


class _DamagedError(CheckpointError):
    """What was fetched differs from what was uploaded."""

    def __init__(self, folder: str, why: object) -> None:
        super().__init__(str(why))
        self.folder = folder


def _fetch_all(place: _Place, chosen: _Chosen, folder: Path, check: Callable[[Path], None]) -> None:
    configs = {home: place.config(upload) for home, (upload, _) in chosen.items()}
    for config in configs.values():
        if config is not None:
            with tempfile.TemporaryDirectory(prefix="diloco-") as beside:
                Path(beside, _CONFIG).write_bytes(config)
                check(Path(beside, _CONFIG))
    for home, (upload, manifest) in chosen.items():
        _fetch(place, upload, manifest, folder / home, configs[home])


def _began(whole: _Whole) -> bool:
    """Return whether there is, or ever was, a step of which all replicas have a whole upload.

    A replica keeps its first upload until there is one.
    """
    return _common(whole) is not None or any(group and group[-1][0].number > 1 for group in whole.values())


def _none_common(whole: _Whole) -> str:
    of_each = []
    for replica in sorted(whole):
        steps = sorted({manifest.step for _, manifest in whole[replica]})
        of_each.append(f"{replica or 'replica-0'} has {', '.join(map(str, steps)) or 'none'}")
    return f"no whole checkpoint that all replicas have. Steps: {'; '.join(of_each)}."


def _passed_over(
    place: _Place, uploads: Mapping[str, list[_Upload]], whole: _Whole, chosen: _Chosen, damaged: Mapping[str, str]
) -> Iterator[str]:
    """Yield sentences about the uploads that are newer than those ``chosen``."""
    yield from damaged.values()
    newer = set[str]()
    for replica, (upload, _) in chosen.items():
        later = {each.name for each in uploads[replica] if each.number > upload.number}
        newer |= later - {upload.name}
    if not newer:
        return
    name = max(newer)
    why = []
    for replica in chosen:
        if name not in [upload.name for upload, _ in whole[replica]]:
            begun = name in [upload.name for upload in uploads[replica]]
            why.append(f"{replica or 'replica-0'} {'has no whole upload of it' if begun else 'has not uploaded it'}")
    step, last = next(iter(chosen.values()))[1].step, int(name.removeprefix("step-"))
    again = f"; {last - step} steps are trained again" if last > step else ""
    reason = f" ({', '.join(why)})" if why else ""
    yield f"{place.url}: step {last} is passed over{reason}. The newest step that is whole for all is {step}{again}."


def _common(whole: _Whole) -> _Chosen | None:
    """Return the newest whole upload of each replica's state, all of the same step, if there is one."""

    def state(manifest: Manifest) -> tuple[int, object]:
        return manifest.step, manifest.about.get("global_params_digest")

    for first, manifest in whole.get("", []):
        number = int(manifest.about.get("num_replicas", 1))
        chosen = {"": (first, manifest)}
        for replica in filter(None, whole.keys() - manifest.parts.keys()):
            same = [upload for upload in whole[replica] if state(upload[1]) == state(manifest)]
            if same and int(replica[8:]) < number:
                chosen[replica] = same[0]
        inside = [match for match in map(_REPLICA.fullmatch, manifest.parts) if match and int(match[1]) < number]
        if manifest.about.get("elastic") or len(chosen) + len(inside) == number:
            return chosen
    return None


def _fetch(place: _Place, upload: _Upload, manifest: Manifest, home: Path, config: bytes | None) -> None:
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
                try:
                    check_content(partial / name, facts)
                except CheckpointError:
                    why = f"{place.url}/{upload.folder}/{name} is damaged: its digest differs from the manifest's."
                    raise _DamagedError(upload.folder, why) from None
        write_manifest(partial, manifest)
        if not newer:
            _fetch_home(place, upload, home, config)


def _fetch_home(place: _Place, upload: _Upload, home: Path, config: bytes | None) -> None:
    """Fetch the files of the run folder, of any size; its settings were read before."""
    for file in upload.sizes:
        name = file.removeprefix(_HOME)
        if name == file or not _COPIED.fullmatch(name) or (name == "metrics.jsonl" and (home / name).exists()):
            continue
        if name != _CONFIG:
            write_whole(home / name, place.chunks_of(f"{upload.folder}/{file}"))
        elif config is not None:
            write_whole(home / name, config)
