"""Two hosts made of network namespaces, and an elastic job over them that loses one host and gets it back.

Run as ``unshare -Urn python -m tests.faults.two_hosts OUT``: this process and the first host live in that namespace,
the second host in one of its own; a pair of virtual cables joins them. No privilege is needed beyond user namespaces.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fulltilt.train import checkpoint

# The first host's address is not on the cable: it stays when the cable is pulled.
FIRST, HERE, SECOND, PORT = "10.77.0.1", "10.77.1.1", "10.77.1.2", 29411


def ip(*words: str, inside: int | None = None) -> None:
    enter = ["nsenter", "-t", str(inside), "-n"] if inside is not None else []
    subprocess.run([*enter, "ip", *words], check=True)


def torchrun(address: str, cable: str, out: Path, log: Path, inside: int | None = None) -> subprocess.Popen[bytes]:
    """An agent on one host, its rank with it, in a session of their own."""
    impatient = "last_call_timeout=3,join_timeout=90,keep_alive_interval=1,keep_alive_max_attempt=3"
    impatient += f",is_host={int(inside is None)}"
    command = [
        *(["nsenter", "-t", str(inside), "-n"] if inside is not None else []),
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={FIRST}:{PORT}", "--rdzv-id=two-hosts", f"--rdzv-conf={impatient}"),
        *(f"--local-addr={address}", "-m", "tests.faults.host_job", str(out)),
    ]
    # Agents that share their store (torch 2.15's default) never tell a host that joins later where it is.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": cable, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)


def second_host() -> subprocess.Popen[bytes]:
    """A namespace with its end of the cable; it lives as long as the process that is returned."""
    host = subprocess.Popen(["unshare", "-nu", "sleep", "600"])
    while Path(f"/proc/{host.pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
        time.sleep(0.01)
    ip("link", "add", "cable1", "type", "veth", "peer", "name", "cable2", "netns", str(host.pid))
    ip("addr", "add", f"{HERE}/24", "dev", "cable1")
    ip("link", "set", "cable1", "up")
    ip("addr", "add", f"{SECOND}/24", "dev", "cable2", inside=host.pid)
    for device in ("lo", "cable2"):
        ip("link", "set", device, "up", inside=host.pid)
    ip("route", "add", FIRST, "via", HERE, inside=host.pid)
    return host


def kill_host(host: subprocess.Popen[bytes], agent: subprocess.Popen[bytes]) -> None:
    """Pull the cable first: a host that loses its power does not say goodbye."""
    ip("link", "del", "cable1")
    for child in _family(agent.pid):
        os.kill(child, signal.SIGKILL)
    host.kill()
    agent.wait()
    host.wait()


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(member for child in children for member in _family(int(child)))]


def wait_for(out: Path, step: int, timeout_s: float = 120) -> None:
    """Wait until a checkpoint of ``step`` or later is there."""
    deadline_s = time.monotonic() + timeout_s
    while not any(int(folder.name[5:]) >= step for folder in (out / "checkpoints").glob("step-*")):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"step {step} was not reached")
        time.sleep(0.05)


def main(out: Path) -> int:
    checkpoint.claim(out)
    ip("link", "add", "first", "type", "veth", "peer", "name", "nowhere")
    ip("addr", "add", f"{FIRST}/32", "dev", "first")
    for device in ("lo", "first", "nowhere"):
        ip("link", "set", device, "up")
    host = second_host()
    survivor = torchrun(FIRST, "first", out, out / "host1.log")
    try:
        lost = torchrun(SECOND, "cable2", out, out / "host2.log", inside=host.pid)
        wait_for(out, 8)
        kill_host(host, lost)
        wait_for(out, 20)
        host = second_host()
        torchrun(SECOND, "cable2", out, out / "host2.log", inside=host.pid)
        return survivor.wait(timeout=180)
    finally:
        for process in (survivor, host):
            process.kill()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
