"""Checkpoints at another place: whatever happens to an upload, the newest whole one is fetched, and nothing half."""

import errno
import os
import re
import shutil
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem

from diloco.checkpoint import Mirror, fetch_run, save_checkpoint
from diloco.errors import CheckpointError, ConfigurationError
from tests.checkpoint.marked_checkpoints import kill_at_every_call, mark_of, names, resealed, save
from tests.processes import Processes

RUN = {"model": "m", "data": "d", "seed": "0"}


@pytest.fixture
def place() -> Iterator[str]:
    """A place in a store of fsspec that needs no network."""
    yield "memory://place/run"
    fsspec.filesystem("memory").store.clear()


def store(place: str) -> DirFileSystem:
    fs, root = fsspec.core.url_to_fs(place)
    return DirFileSystem(root, fs)


def whole(place: str) -> list[str]:
    return sorted(path.split("/")[-2][:22] for path in store(place).find("") if path.endswith("manifest.json"))


def home(folder: Path) -> Path:
    """Return a run folder with what a run leaves beside its checkpoints."""
    folder.mkdir()
    (folder / "summary.json").mkdir()  # is not copied, like all but the first three
    mine = "token.json", "notes.txt", "wandb.toml"
    for name in ("config.toml", "tokenizer.json", "metrics.jsonl", "identity.key", "diloco.lock", *mine):
        (folder / name).write_text(f"{folder.name}, {name}")
    return folder


def claimed(place: str, run: Path, keep: int = 2, *, fresh: bool = True) -> Mirror:
    mirror = Mirror(place, run, keep)
    mirror.claim(RUN, fresh=fresh)
    return mirror


def mirrored(place: str, run: Path, *marks: float, keep: int = 2, fresh: bool = True) -> None:
    """Save and upload the checkpoints of these steps, one after the other."""
    mirror = claimed(place, run, keep, fresh=fresh)
    for mark in marks:
        with closing(mirror):
            mirror.offer(save(run / "checkpoints", int(mark), mark))


def test_the_newest_ones_are_there_and_the_newest_comes_back_with_the_run_folder(place: str, tmp_path: Path) -> None:
    assert not fetch_run(place, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    mirrored(place, home(tmp_path / "run"), 1, 2, 3)
    assert whole(place) == ["00000002-step-00000002", "00000003-step-00000003"]
    assert fetch_run(place, tmp_path / "new")
    assert mark_of(tmp_path / "new") == 3
    assert names(tmp_path / "new") == {"checkpoints", "config.toml", "tokenizer.json", "metrics.jsonl"}
    assert (tmp_path / "new" / "config.toml").read_text() == "run, config.toml"
    # a run that resumes from an earlier step counts on: what was uploaded last is the newest
    mirrored(place, tmp_path / "new", 2, fresh=False)
    assert whole(place) == ["00000003-step-00000003", "00000004-step-00000002"]
    fetch_run(place, tmp_path / "run")
    assert mark_of(tmp_path / "run") == 2


def upload_and_be_killed(rank: int, top: Path) -> None:
    """Upload a second checkpoint in a process that is killed two system calls later each time."""
    run = home(top / "run")
    mirrored(str(top / "before"), run, 1, keep=1)
    second = save(run / "checkpoints", 2, 2.0)

    def upload(place: Path) -> None:
        mirror = claimed(str(place), run, keep=1, fresh=False)
        mirror.offer(second)
        mirror.close()

    kill_at_every_call(top / "places", top / "before", upload, every=2)


def test_kill_9_at_any_moment_of_an_upload_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(1, upload_and_be_killed, tmp_path)
        processes.results(120)
    marks = []
    for number, place in enumerate(sorted((tmp_path / "places").iterdir())):
        assert fetch_run(str(place), tmp_path / "fetched" / place.name)
        marks.append(mark_of(tmp_path / "fetched" / place.name))
        if number % 8 == 0:
            mirrored(str(place), tmp_path / "fetched" / place.name, 3, keep=1, fresh=False)
            left = {path.parent for path in place.glob("checkpoints/*/*.json")}
            assert len(left) == 1, "what a kill leaves is deleted with the next upload"
    assert marks == sorted(marks)
    assert set(marks) == {1, 2}
    assert len(marks) > 20


def outside(members: dict[str, Any]) -> None:
    members["parts"]["run"]["../../../config.toml"] = {"size_bytes": 1, "digest": "0"}


CHANGES: dict[str, tuple[str, Callable[[bytes], bytes] | None]] = {
    "no manifest": ("manifest.json", None),
    "half a manifest": ("manifest.json", lambda content: content[: len(content) // 2]),
    "an empty manifest": ("manifest.json", lambda content: b""),
    "a manifest of files elsewhere": ("manifest.json", lambda content: resealed(content, outside)),
    "the manifest of another step": ("manifest.json", lambda content: resealed(content, lambda m: m.update(step=7))),
    "a missing file": ("run.json", None),
    "half a file": ("replica-0.safetensors", lambda content: content[: len(content) // 2]),
    "a file that is too long": ("replica-0.safetensors", lambda content: content + b"0"),
}


def change_newest(place: str, file: str, change: Callable[[bytes], bytes] | None) -> None:
    there = store(place)
    path = max(there.glob(f"checkpoints/*/{file}"))
    content = there.cat_file(path)
    there.rm_file(path)
    if change is not None:
        there.pipe_file(path, change(content))


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_whole_is_never_taken(change: str, place: str, tmp_path: Path) -> None:
    mirrored(place, home(tmp_path / "run"), 1, 2)
    change_newest(place, *CHANGES[change])
    assert fetch_run(place, tmp_path / "new")
    assert mark_of(tmp_path / "new") == 1
    assert names(tmp_path / "new" / "checkpoints") == {"step-00000001"}


def test_no_whole_checkpoint_where_there_was_one_is_an_error(place: str, tmp_path: Path) -> None:
    mirrored(place, home(tmp_path / "run"), 1)
    change_newest(place, "run.json", None)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        fetch_run(place, tmp_path / "new")
    assert list((tmp_path / "new").rglob("step-*")) == []
    with pytest.raises(ConfigurationError, match="has the checkpoints of a run already"):
        claimed(place, tmp_path / "run")


def test_a_damage_that_only_the_digest_shows_costs_the_steps_after_the_one_before_and_is_told(
    place: str, tmp_path: Path
) -> None:
    mirrored(place, run := home(tmp_path / "run"), 1, 7)
    change_newest(place, "run.json", bytes.swapcase)
    told: list[str] = []
    assert fetch_run(place, tmp_path / "new", tell=told.append)
    assert mark_of(tmp_path / "new") == 1
    assert names(tmp_path / "new" / "checkpoints") == {"step-00000001"}
    assert re.search(r"step-00000007-\w+/run\.json is damaged: its digest differs from the manifest's", told[0])
    assert re.search(r"step 7 is passed over.* is 1; 6 steps are trained again", told[1])
    assert len(told) == 2
    told.clear()
    shutil.rmtree(run / "checkpoints" / "step-00000007")
    mirrored(place, tmp_path / "new", 8, fresh=False)
    assert fetch_run(place, run, tell=told.append), "what was passed over once is deleted with the next upload"
    assert (mark_of(run), told) == (8, [])
    change_newest(place, "run.json", bytes.swapcase)
    with pytest.raises(CheckpointError, match=r"is damaged: .* no whole checkpoint that all replicas have"):
        fetch_run(place, tmp_path / "third")


def test_half_an_upload_costs_its_steps_and_is_told(place: str, tmp_path: Path) -> None:
    mirrored(place, home(tmp_path / "run"), 4, 8)
    change_newest(place, "replica-0.safetensors", lambda content: content[:-5])
    told: list[str] = []
    assert fetch_run(place, tmp_path / "new", tell=told.append)
    assert [re.sub(r"memory\S+ ", "", each) for each in told] == [
        "step 8 is passed over (replica-0 has no whole upload of it). The newest step that is whole for all is 4; "
        "4 steps are trained again."
    ]


def test_names_that_leave_the_folder_are_not_written(place: str, tmp_path: Path) -> None:
    mirrored(place, home(tmp_path / "run"), 1)
    there = store(place)
    (path,) = there.glob("checkpoints/*/manifest.json")
    for name in ("home/a/b.json", "home/.bashrc", "home/identity.key", "home/x.py", "home/x.json"):
        there.makedirs(path.replace("manifest.json", "home/a"), exist_ok=True)
        there.pipe_file(path.replace("manifest.json", name), b"evil")
    fetch_run(place, tmp_path / "new")
    assert names(tmp_path / "new") == {"checkpoints", "config.toml", "tokenizer.json", "metrics.jsonl"}


def test_a_link_in_a_place_on_disk_is_not_followed(tmp_path: Path) -> None:
    mirrored(str(tmp_path / "place"), home(tmp_path / "run"), 1, 2)
    file = max((tmp_path / "place").rglob("run.json"))
    shutil.move(file, tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    assert fetch_run(str(tmp_path / "place"), tmp_path / "new")
    assert mark_of(tmp_path / "new") == 1


def test_of_two_writers_the_later_one_goes_on_and_both_write_only_whole_checkpoints(place: str, tmp_path: Path) -> None:
    mirrored(place, one := home(tmp_path / "one"), 1)
    old = claimed(place, one, fresh=False)
    new = claimed(place, home(tmp_path / "two"), fresh=False)
    new.offer(save(tmp_path / "two" / "checkpoints", 2, 2.0))
    old.offer(save(one / "checkpoints", 3, 3.0))
    new.close()
    with pytest.raises(CheckpointError, match=r"written to by another process, .*step-00000003 is complete on this"):
        old.close()
    assert whole(place) == ["00000001-step-00000001", "00000002-step-00000002"]


@pytest.mark.parametrize(
    ("identity", "fresh", "words"),
    [
        (RUN, True, "has the checkpoints of a run already"),
        (RUN | {"data": "other"}, False, "has data = d and this run has"),
    ],
)
def test_the_place_of_another_run_is_refused_and_left_to_it(
    identity: dict[str, str], fresh: bool, words: str, place: str, tmp_path: Path
) -> None:
    mirror = claimed(place, run := home(tmp_path / "run"))
    mirror.offer(save_checkpoint(run / "checkpoints", 1, {"run": {}}, about={"identity": RUN}, keep=1))
    mirror.close()
    with pytest.raises(ConfigurationError, match=words):
        Mirror(place, run, 2).claim(identity, fresh=fresh)
    mirror.offer(save_checkpoint(run / "checkpoints", 2, {"run": {}}, about={"identity": RUN}, keep=1))
    mirror.close()


class Failing:
    """Lets some calls of a store's method fail, as a full bucket and expired credentials do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception) -> None:
        self.left, usual = 0, getattr(DirFileSystem, method)

        def call(*arguments: Any, **options: Any) -> Any:
            if self.left:
                self.left -= 1
                raise error
            return usual(*arguments, **options)

        monkeypatch.setattr(DirFileSystem, method, call)


FULL, DENIED = OSError(errno.ENOSPC, "QuotaExceeded"), PermissionError("AccessDenied")


def test_an_upload_that_fails_is_told_and_the_next_one_is_whole(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrored(place, run := home(tmp_path / "run"), 1)
    failing, mirror = Failing(monkeypatch, "open", FULL), claimed(place, run, 1, fresh=False)
    failing.left = 1
    mirror.offer(save(run / "checkpoints", 2, 2.0))
    mirror.close()  # tries once more
    (sentence,) = mirror.sentences
    assert re.match("step-00000002 was not uploaded, which is tried again with the next: .*QuotaExceeded", sentence)
    assert whole(place) == ["00000002-step-00000002"]
    failing.left = 2
    mirror.offer(save(run / "checkpoints", 3, 3.0))
    with pytest.raises(CheckpointError, match=r"QuotaExceeded.*step-00000003 is complete on this machine"):
        mirror.close()
    odd = save(run / "checkpoints", 4, 4.0) / "odd"
    odd.mkdir()
    mirror.offer(odd.parent)
    with pytest.raises(CheckpointError, match=r"It can't be read: .*odd.*step-00000004 is complete on this machine"):
        mirror.close()
    assert fetch_run(place, tmp_path / "new")
    assert mark_of(tmp_path / "new") == 2


def test_uploads_that_fail_do_not_fill_the_place(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, usual = claimed(place, run := home(tmp_path / "run")), DirFileSystem.open

    def open_or_fail(store: DirFileSystem, path: str, *given: Any) -> Any:
        if path.endswith("/manifest.json"):
            raise FULL
        return usual(store, path, *given)

    monkeypatch.setattr(DirFileSystem, "open", open_or_fail)
    mirror.offer(save(run / "checkpoints", 1, 1.0))
    with pytest.raises(CheckpointError, match="QuotaExceeded"):
        mirror.close()
    assert store(place).find("") == ["writer.json"]


def test_the_settings_that_were_checked_are_those_that_are_written(place: str, tmp_path: Path) -> None:
    """Whoever can write there may exchange them while the checkpoint is fetched."""
    mirrored(place, home(tmp_path / "run"), 1)

    def check(settings: Path) -> None:
        assert settings.read_text() == "run, config.toml"
        store, root = fsspec.core.url_to_fs(place)
        (there,) = store.glob(f"{root}/checkpoints/*/home/config.toml")
        store.pipe_file(there, b"data = 'mine'   ")

    fetch_run(place, tmp_path / "new", check=check)
    assert (tmp_path / "new" / "config.toml").read_text() == "run, config.toml"


@pytest.mark.parametrize("file", ["metrics.jsonl", "tokenizer.json", "config.toml", "manifest.json", "writer.json"])
def test_no_file_takes_memory_by_its_size(file: str, tmp_path: Path) -> None:
    """Who can write there chooses it. Before, all of the run folder was read at once, before its settings were."""
    place, run = tmp_path / "place", home(tmp_path / "run")
    mirrored(str(place), run, 1)
    (path,) = place.rglob(file)
    os.truncate(path, size := 80 << 20)  # takes no room on the disk
    tracemalloc.start()
    try:
        if file == "config.toml":
            with pytest.raises(CheckpointError, match=r"config\.toml has more than 1048576 bytes"):
                fetch_run(str(place), tmp_path / "new")
        elif file == "writer.json":
            mirror = Mirror(str(place), run, 2)
            mirror.offer(run / "checkpoints" / "step-00000001")
            with pytest.raises(CheckpointError, match="is now written to by another process"):
                mirror.close()
        else:
            assert fetch_run(str(place), tmp_path / "new") == (file != "manifest.json")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20
    if file in ("metrics.jsonl", "tokenizer.json"):
        assert (tmp_path / "new" / file).stat().st_size == size


def test_what_became_larger_since_it_was_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, run = tmp_path / "place", home(tmp_path / "run")
    mirrored(str(place), run, 1)
    (path,) = place.rglob("config.toml")
    listed = DirFileSystem.find

    def grows(system: DirFileSystem, *arguments: Any, **more: Any) -> Any:
        sizes = listed(system, *arguments, **more)
        os.truncate(path, 65 << 20)
        return sizes

    monkeypatch.setattr(DirFileSystem, "find", grows)
    with pytest.raises(CheckpointError, match=r"config\.toml has grown"):
        fetch_run(str(place), tmp_path / "new")


def test_who_may_not_delete_uploads_all_the_same(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = home(tmp_path / "run")
    Failing(monkeypatch, "rm_file", DENIED).left = 99
    mirror = claimed(place, run, keep=1)
    for mark in (1, 2):
        mirror.offer(save(run / "checkpoints", mark, mark))
        mirror.close()
    (sentence,) = mirror.sentences
    assert "step-00000002 was uploaded, but the oldest ones stay: " in sentence
    assert whole(place) == ["00000001-step-00000001", "00000002-step-00000002"]


@pytest.mark.parametrize("method", ["pipe_file", "find"])
def test_a_place_that_can_not_be_used_is_refused_before_the_first_step(
    method: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Failing(monkeypatch, method, DENIED).left = 1
    with pytest.raises(CheckpointError, match=r"can't be written to: .*AccessDenied"):
        claimed(place, home(tmp_path / "run"))
    Failing(monkeypatch, "find", DENIED).left = 1
    with pytest.raises(CheckpointError, match="can't be read: PermissionError"):
        fetch_run(place, tmp_path / "new")
    monkeypatch.setattr(DirFileSystem, "find", lambda *arguments, **options: {})  # it hides what it holds
    with pytest.raises(CheckpointError, match="does not list what was written to it"):
        claimed(place, tmp_path / "run")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nothing://x/y", "Protocol not known: nothing"),
        ("dropbox://x/y", "needs a library, which"),
        ("zip://.", "can't be used: .*Is a directory"),
        ("sftp://me:hunter2@host/x", r"^sftp://\.\.\. has a password"),
        ("reference://x", "can run code"),
    ],
)
def test_a_store_that_is_not_known_or_not_installed_is_named(url: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Mirror(url, tmp_path, 1)


def test_what_is_being_uploaded_stays_until_then_and_what_waits_is_left_out(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on, usual = threading.Event(), threading.Event(), DirFileSystem.open

    def slow(*arguments: Any, **options: Any) -> Any:
        began.set()
        assert goes_on.wait(60)
        return usual(*arguments, **options)

    mirror = claimed(place, run := home(tmp_path / "run"))
    monkeypatch.setattr(DirFileSystem, "open", slow)
    mirror.offer(save(run / "checkpoints", 1, 1.0, keep=1))
    assert began.wait(60)
    for mark in (2, 3):  # each would delete the ones before
        mirror.offer(save(run / "checkpoints", mark, mark, keep=1, in_use=mirror.in_use))
    assert names(run / "checkpoints") == {f"step-0000000{mark}" for mark in (1, 2, 3)}
    goes_on.set()
    mirror.close()
    assert not mirror.in_use
    save(run / "checkpoints", 4, 4.0, keep=1, in_use=mirror.in_use)
    assert names(run / "checkpoints") == {"step-00000004"}
    assert whole(place) == ["00000001-step-00000001", "00000002-step-00000003"]
    change_newest(place, "manifest.json", None)
    fetch_run(place, tmp_path / "new")
    assert mark_of(tmp_path / "new") == 1


def test_an_upload_opens_one_file_at_a_time(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have few file descriptors, and a checkpoint of many replicas many files."""
    run, usual, most = home(tmp_path / "run"), DirFileSystem.open, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal most
        opened = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
        most = max(most, sum(path.startswith(str(run)) for path in opened))
        return usual(*arguments, **options)

    monkeypatch.setattr(DirFileSystem, "open", counted)
    mirrored(place, run, 1)
    assert most == 1


def claimed_by(place: str, run: Path, number: int, *, fresh: bool, keep: int = 9) -> Mirror:
    mirror = Mirror(place, run, keep, number)
    mirror.claim(RUN, fresh=fresh)
    return mirror


def replica(place: str, folder: Path, number: int, *steps: int, digest: str = "", keep: int = 9) -> None:
    """Save and upload what a replica in a process of its own does."""
    run = folder / f"replica-{number}" if number else folder
    run.mkdir(parents=True, exist_ok=True)
    mirror = claimed_by(place, run, number, fresh=False, keep=keep)
    for step in steps:
        about = {"num_replicas": 2, "identity": RUN, "global_params_digest": digest or str(step)}
        parts = {f"replica-{number}": {"step": step}}
        mirror.offer(save_checkpoint(run / "checkpoints", step, parts, about=about, keep=9))
        mirror.close()


@pytest.mark.parametrize("own", [None, 0, 1])
def test_replicas_that_are_processes_get_the_newest_step_that_all_have(
    own: int | None, place: str, tmp_path: Path
) -> None:
    replica(place, tmp_path / "run", 0, 1, 2, 3)
    replica(place, tmp_path / "run", 1, 1, 2)
    replica(place, tmp_path / "run", 1, 3, digest="of another history")
    assert fetch_run(place, tmp_path / "new", own)
    fetched = {path.relative_to(tmp_path / "new").as_posix() for path in (tmp_path / "new").rglob("step-*")}
    all_of_it = {f"{home}checkpoints/step-00000002" for home in ("", "replica-1/")}
    assert fetched == {each for each in all_of_it if own is None or each.startswith("replica-1") == bool(own)}


def test_a_number_of_replicas_that_somebody_has_written_takes_no_memory(place: str, tmp_path: Path) -> None:
    mirrored(place, home(tmp_path / "run"), 1)
    crowd, swarm = {"num_replicas": 1 << 60}, {"elastic": True}
    change_newest(place, "manifest.json", lambda content: resealed(content, lambda m: m["about"].update(crowd)))
    assert not fetch_run(place, tmp_path / "new")
    change_newest(place, "manifest.json", lambda content: resealed(content, lambda m: m["about"].update(swarm)))
    assert fetch_run(place, tmp_path / "new"), "each peer of a swarm has all that it needs"


@pytest.mark.parametrize("others", [(), (2,)])
@pytest.mark.parametrize("own", [None, 0, 1])
def test_a_run_that_was_killed_before_all_had_uploaded_a_step_begins_again_and_says_so(
    others: tuple[int, ...], own: int | None, place: str, tmp_path: Path
) -> None:
    replica(place, tmp_path / "run", 0, 1)
    replica(place, tmp_path / "run", 1, *others)
    told: list[str] = []
    assert not fetch_run(place, tmp_path / "new", own, tell=told.append)
    there = "Steps: replica-0 has 1" + "; replica-1 has 2" * len(others)
    assert len(told) == 1
    assert there in told[0]
    assert not (tmp_path / "new").exists()
    for number in (0, 1):
        claimed_by(place, tmp_path / "new", number, fresh=True)
    assert fetch_run(place, tmp_path / "run", own, tell=told.append), "what is in the run folder is used"
    assert "goes on from what is in the run folder" in told[1]


def test_replicas_that_have_no_step_in_common_any_more_do_not_begin_again(place: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        for number in (0, 1):
            replica(place, tmp_path / "run", number, step, keep=1)
    store(place).rm("replica-1", recursive=True)
    with pytest.raises(
        CheckpointError, match=r"no whole checkpoint that all replicas have\. Steps: replica-0 has 2, 3"
    ):
        fetch_run(place, tmp_path / "new")
    with pytest.raises(ConfigurationError, match="has the checkpoints of a run already"):
        claimed_by(place, tmp_path / "new", 0, fresh=True)


def uploaded(place: str) -> list[tuple[int, int]]:
    """Return the replica and the step of each whole upload."""
    paths = [path for path in store(place).find("") if path.endswith("manifest.json")]
    return sorted((int("replica-1" in path), int(path.split("/")[-2][14:22])) for path in paths)


def test_a_step_stays_until_a_newer_one_is_whole_for_all_replicas(place: str, tmp_path: Path) -> None:
    """Replica 1 uploads slowly: whenever all are killed, there is a step that all have."""
    run = tmp_path / "run"
    replica(place, run, 0, 1, keep=1)
    replica(place, run, 0, 2, keep=1)
    assert uploaded(place) == [(0, 1), (0, 2)], "nothing is whole for all yet"
    replica(place, run, 1, 1, keep=1)
    for step in (3, 4, 5):
        replica(place, run, 0, step, keep=1)
        assert uploaded(place) == [(0, 1), (0, step), (1, 1)]
    there = store(place)
    there.pipe_file("replica-1/checkpoints/00000002-step-00000005-0a0b0c0d/home/config.toml", b"")
    for step in (6, 7):
        replica(place, run, 0, step, keep=1)
        assert uploaded(place) == [(0, 1), (0, 5), (0, step), (1, 1)], "step 5 is being uploaded"
    replica(place, run, 1, 5, keep=1)
    assert uploaded(place) == [(0, 1), (0, 5), (0, 7), (1, 5)]
    replica(place, run, 0, 8, keep=1)
    assert uploaded(place) == [(0, 5), (0, 8), (1, 5)]
    assert fetch_run(place, tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").rglob("step-*")} == {"step-00000005"}


def test_fetching_writes_nothing_again_and_keeps_a_later_checkpoint_the_newest(place: str, tmp_path: Path) -> None:
    """A run that trains there may be the reason that the command is refused afterwards."""
    mirrored(place, run := home(tmp_path / "run"), 1, 2)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert fetch_run(place, run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    save(run / "checkpoints", 3, 3.0, keep=1)
    (run / "config.toml").write_text("newer")
    assert fetch_run(place, run)
    assert mark_of(run) == 3
    assert (run / "config.toml").read_text() == "newer"
