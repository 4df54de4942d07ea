"""A job over two hosts of network namespaces under `fulltilt run`: one host is lost, and the job is started again.

Run as ``unshare -Urnu python -m tests.faults.two_recorded_hosts OUT``. The hosts have names of their own and share a
folder without locks: a sitecustomize on PYTHONPATH lets flock fail, in Fulltilt as in the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from fulltilt import store
from fulltilt.diagnosis import answer
from fulltilt.errors import FulltiltError
from fulltilt.records import Run
from tests.faults.two_hosts import FIRST, SECOND, ip, kill_host, second_host

NO_LOCKS = """
import errno, fcntl
def flock(*_):
    raise OSError(errno.ENOLCK, "no locks available")
fcntl.flock = flock
"""


def launch(out: Path, steps: int, cable: str, inside: int | None = None) -> subprocess.Popen[bytes]:
    """`fulltilt run` on one host, with two ranks."""
    enter = ["nsenter", "-t", str(inside), "-n", "-u"] if inside is not None else []
    rendezvous = f"--rdzv-backend=c10d --rdzv-endpoint={FIRST}:29455 --rdzv-id=job --rdzv-conf=is_host={int(not enter)}"
    command = [
        *(*enter, sys.executable, "-m", "fulltilt", "run", "--out", str(out), "--"),
        *("torchrun", "--nnodes=2", "--nproc-per-node=2", *rendezvous.split()),
        f"--local-addr={SECOND if enter else FIRST}",
        *("-m", "tests.faults.recorded_job", str(steps)),
    ]
    path = os.pathsep.join((str(out.parent), os.environ.get("PYTHONPATH", "")))
    # Agents that share their store (torch 2.15's default) never tell a host that joins later where it is.
    quirk = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": cable, "PYTHONPATH": path, **quirk}
    with (out.parent / f"{cable}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def name_of(host: int, inside: int | None = None) -> None:
    enter = ["nsenter", "-t", str(inside), "-u"] if inside is not None else []
    subprocess.run([*enter, "hostname", f"host{host}"], check=True)


def wait_for(out: Path, what: str, seen: Callable[[Run], bool]) -> Run:
    deadline_s = time.monotonic() + 240
    while time.monotonic() < deadline_s:
        try:
            if seen(run := store.load(out)):
                return run
        except FulltiltError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"{what} was never seen")


def main(out: Path) -> int:
    (out.parent / "sitecustomize.py").write_text(NO_LOCKS)
    name_of(1)
    ip("link", "add", "first", "type", "veth", "peer", "name", "nowhere")
    ip("addr", "add", f"{FIRST}/32", "dev", "first")
    for device in ("lo", "first", "nowhere"):
        ip("link", "set", device, "up")
    host = second_host()
    name_of(2, host.pid)
    one, two = launch(out, 100_000, "first"), launch(out, 100_000, "cable2", host.pid)
    wait_for(out, "step 60", lambda run: len(run.ranks) == 4 and min(rank.steps for rank in run.ranks) >= 60)
    if psutil.Process(one.pid).net_connections():
        raise SystemExit("fulltilt run has a socket")
    kill_host(host, two)
    run = wait_for(out, "a job that stands still", lambda run: "no step for" in answer(run).verdict.sentence)
    print(answer(run).verdict.sentence)
    os.killpg(one.pid, signal.SIGTERM)  # as a scheduler ends what is left of a job
    one.wait(timeout=240)
    print(sorted(str(file.relative_to(out)) for file in out.glob("*/*")), flush=True)
    # The same command once more, as a requeue does it.
    host = second_host()
    name_of(2, host.pid)
    one, two = launch(out, 100, "first"), launch(out, 100, "cable2", host.pid)
    codes = one.wait(timeout=240), two.wait(timeout=240)
    host.kill()
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
