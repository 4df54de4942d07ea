"""Jobs are found by their run folder and by their GPU, each once."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fulltilt.probes.jobs import RUN_FOLDER_VARIABLE, JobProbe
from fulltilt.records import GpuProcess, JobProcess

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="uses sh and sleep")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A run's root process with two processes under it."""
    folder = str(tmp_path / "run")
    environ = os.environ | {RUN_FOLDER_VARIABLE: folder}
    root = subprocess.Popen(
        ["sh", "-c", "sleep 60 & sleep 60 & echo ready; wait"],
        env=environ,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert root.stdout is not None
    root.stdout.readline()
    yield root.pid, folder
    os.killpg(root.pid, 9)
    root.wait()
    root.stdout.close()


def of_run(jobs: tuple[JobProcess, ...], folder: str) -> list[JobProcess]:
    return [job for job in jobs if job.run_folder == folder]


def test_a_run_is_found_by_its_root_with_everything_under_it(job: tuple[int, str]) -> None:
    pid, folder = job
    (found,) = of_run(JobProbe().read(), folder)
    assert (found.pid, found.name, found.children) == (pid, "sh", 2)
    assert found.pss_bytes is not None
    assert found.pss_bytes > 0


def test_cpu_use_is_known_from_the_second_reading_on(job: tuple[int, str]) -> None:
    _, folder = job
    probe = JobProbe()
    assert of_run(probe.read(), folder)[0].cpu_pct is None
    time.sleep(0.1)
    assert of_run(probe.read(), folder)[0].cpu_pct == pytest.approx(0.0, abs=5.0)


def test_a_process_on_a_gpu_stands_for_its_run(job: tuple[int, str]) -> None:
    pid, folder = job
    child = int(subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout.split()[0])
    jobs = JobProbe().read([GpuProcess(child, "sleep", 1 << 30, False)])
    assert [found.pid for found in of_run(jobs, folder)] == [child]  # and its root is not listed beside it


def test_a_process_of_nobodys_run_has_none() -> None:
    (found,) = (j for j in JobProbe().read([GpuProcess(os.getpid(), None, None, False)]) if j.pid == os.getpid())
    assert found.run_folder is None
    assert found.name is not None


def test_a_number_that_is_another_process_here_is_not_mistaken_for_it(job: tuple[int, str]) -> None:
    pid, _ = job
    (found,) = (j for j in JobProbe().read([GpuProcess(pid, "python-in-a-container", 1, False)]) if j.pid == pid)
    assert found == JobProcess(pid, "python-in-a-container")


def test_a_process_that_has_gone_is_no_reason_to_fail() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert JobProcess(gone.pid, "true") in JobProbe().read([GpuProcess(gone.pid, "true", 1, False)])


def test_a_run_that_ended_is_not_shown_again(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    root = subprocess.Popen(["sleep", "60"], env=os.environ | {RUN_FOLDER_VARIABLE: folder})
    probe = JobProbe()
    assert of_run(probe.read(), folder)
    root.kill()
    root.wait()
    assert not of_run(probe.read(), folder)
