"""The cores that a process may use, and the environment variables of OpenMP."""

import os
from pathlib import Path

import pytest

from diloco.devices import set_thread_share, usable_cores


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def siblings(*cores: str) -> dict[str, str]:
    """Return the topology files of a machine, given the core of each of the hardware threads 0, 1, ..."""
    home = "sys/devices/system/cpu"
    return {f"{home}/cpu{number}/topology/thread_siblings_list": f"{core}\n" for number, core in enumerate(cores)}


@pytest.fixture
def four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 4),
        (siblings("0-1", "0-1", "2-3", "2-3"), 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/user/job\n", "sys/fs/cgroup/user/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/of/the/host\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    ],
    ids=["nothing known", "hardware threads", "no limit", "3", "around it", "container"],
)
def test_cores_are_those_that_the_kernel_lets_it_use(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    assert usable_cores(machine(tmp_path, files)) == cores


@pytest.mark.usefixtures("four_processors")
def test_processes_that_start_together_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.devices.usable_cores", lambda: 4)
    for processes, threads in ((2, "2"), (3, "1"), (9, "1")):
        environment: dict[str, str] = {}
        set_thread_share(environment, processes)
        assert environment == {"OMP_NUM_THREADS": threads}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_of_threads_that_the_user_chose_stays(name: str) -> None:
    environment = {name: "7"}
    set_thread_share(environment, 4)
    assert environment == {name: "7"}
