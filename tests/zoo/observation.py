"""Runs a job of the zoo under `fulltilt run` and compares what Fulltilt says with what the job itself counted."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.records import Run
from tests.zoo.catalogue import ZOO, Specimen

RATE_TOLERANCE = 0.03
UNATTRIBUTED_TOLERANCE = 0.03
SHARE_TOLERANCE = 0.05
CPUS = 2
SHM_MEGABYTES = 16
READS_PER_S = 5000
MEMORY_LIMIT_BYTES = 2_000_000_000
LONGEST_S = 90


class NotPossibleHere(Exception):
    """This machine does not allow the surroundings that a job needs."""


@dataclass(frozen=True)
class Observation:
    """A job that has run: what it told of itself, and Fulltilt's answer."""

    specimen: Specimen
    exit_code: int
    output: str
    errors: str
    truth: dict[str, Any]
    answer: dict[str, Any]
    run: Run

    @property
    def found(self) -> dict[str, Any]:
        """The first finding; empty when there is none."""
        return next(iter(self.answer["findings"]), {})

    def share(self, bucket: str) -> float:
        """A bucket as a share of the training part. Launching kernels is not the script's own code."""
        seconds = float(self.answer["ledger"]["buckets"][f"{bucket}_s"])
        if bucket == "host_code" and self.specimen.measured:
            seconds -= sum(rank.launch_s or 0.0 for rank in self.run.ranks)
        return seconds / float(self.truth["seconds"])

    @property
    def unattributed_share(self) -> float:
        """Wall time that nobody can explain, less what a kill may lose."""
        ledger = self.answer["ledger"]
        return max(0.0, float(ledger["buckets"]["unattributed_s"]) - self.specimen.lost_s) / float(ledger["wall_s"])

    @property
    def rates(self) -> tuple[float | None, float]:
        """Fulltilt's rate and the true one: samples a second, or steps where there is nothing to count."""
        if self.specimen.counts_samples:
            return self.answer["throughput"]["samples_per_s"], self.truth["samples_after_first"] / self.truth["seconds"]
        return self.answer["throughput"]["steps_per_s"], (self.truth["steps"] - 1) / self.truth["seconds"]

    def __str__(self) -> str:
        throughput = self.answer["throughput"]
        buckets = {name: round(value, 3) for name, value in self.answer["ledger"]["buckets"].items() if value}
        findings = [
            f"  {f['code']} {f['share']:.0%} {f['severity']} {f['where']} {f['predicted_speedup']}\n    "
            + "\n    ".join(f["evidence"])
            for f in self.answer["findings"]
        ]
        return "\n".join(
            [
                f"truth: {json.dumps(self.truth)}",
                f"verdict: {self.answer['verdict']['sentence']}",
                f"ledger: {self.answer['ledger']['wall_s']:.3f} s {buckets}",
                f"throughput: {throughput}",
                "findings:",
                *findings,
                f"remarks: {[note for rank in self.run.ranks for note in rank.notes]}",
                f"stderr: {self.errors[-2000:]}",
            ]
        )


# --------------------------------------------------------------------------- running


def _python_path() -> str:
    """The zoo's own stopwatch, and whatever the tests themselves were given."""
    return os.pathsep.join(filter(None, [str(ZOO), os.environ.get("PYTHONPATH")]))


def observe(specimen: Specimen, folder: Path) -> Observation:
    """Run a job under `fulltilt run`. Raises NotPossibleHere."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "run"
    with _surroundings(specimen) as (prefix, enter):
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "fulltilt", "run", "--out", str(out), *_job(specimen)],
            cwd=specimen.folder if specimen.launch == "module" else folder,
            env={**os.environ, "PYTHONPATH": _python_path(), "TMPDIR": str(folder)},
            preexec_fn=enter,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
    told = [line.removeprefix("TRUTH ") for line in done.stdout.splitlines() if line.startswith("TRUTH ")]
    if len(told) != 1 or not (out / store.FINDINGS_FILE).exists():
        raise AssertionError(f"{specimen} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return Observation(
        specimen,
        done.returncode,
        done.stdout,
        done.stderr,
        json.loads(told[0]),
        store.read_json(out / store.FINDINGS_FILE),
        store.load(out),
    )


def _job(specimen: Specimen) -> list[str]:
    if specimen.launch == "module":
        return ["-m", specimen.script.removesuffix(".py").replace("/", "."), *specimen.arguments]
    launcher = ["--", "torchrun", "--standalone", "--nproc-per-node=2"] if specimen.launch == "torchrun" else []
    return [*launcher, str(specimen.path), *specimen.arguments]


@contextlib.contextmanager
def _surroundings(specimen: Specimen) -> Iterator[tuple[list[str], Callable[[], None]]]:
    """A command prefix, and what the child does first: jobs without a GPU get two CPUs on every machine alike."""
    prefix: list[str] = []
    procs: Path | None = None
    cpus = None if specimen.on_gpu else CPUS
    with contextlib.ExitStack() as stack:
        if specimen.surroundings == "small_shm":
            prefix = _with_small_shm()
        elif specimen.surroundings == "little_memory":
            procs = stack.enter_context(_little_memory()) / "cgroup.procs"
        elif specimen.surroundings == "slow_disk":
            procs = stack.enter_context(_slow_disk()) / "cgroup.procs"
        elif specimen.surroundings == "neighbour":
            stack.enter_context(_neighbour(specimen.folder / "neighbour.py"))
        yield prefix, functools.partial(_enter, cpus, procs)


def _enter(cpus: int | None, procs: Path | None) -> None:
    if cpus is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])
    if procs is not None:
        procs.write_text(str(os.getpid()))


def _with_small_shm() -> list[str]:
    """A command prefix that gives a process a /dev/shm of its own, as small as some containers have it."""
    mount = f'mount -t tmpfs -o size={SHM_MEGABYTES}m tmpfs /dev/shm && exec "$@"'
    for unshare in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        prefix = [*unshare, "sh", "-c", mount, "sh"]
        with contextlib.suppress(OSError):
            if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
                return prefix
    raise NotPossibleHere("no private mount namespace (unshare --mount)")


@contextlib.contextmanager
def _neighbour(script: Path) -> Iterator[None]:
    """Another process that is at work as long as the block lasts."""
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise NotPossibleHere(f"{script.name} did not start")
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def _group(controller: str, v1: tuple[str, str], v2: tuple[str, str]) -> Iterator[Path]:
    """A control group below ours with a limit: a file and what to write into it, by the version of control groups."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            parent, (file, limit) = Path("/sys/fs/cgroup", controller, path.lstrip("/")), v1
        elif not controllers:
            parent, (file, limit) = Path("/sys/fs/cgroup", path.lstrip("/")), v2
        else:
            continue
        try:
            group = Path(tempfile.mkdtemp(prefix="fulltilt-zoo-", dir=parent))
        except OSError:
            continue
        try:
            (group / file).write_text(limit)
        except OSError:
            group.rmdir()
            continue
        try:
            yield group
        finally:
            group.rmdir()
        return
    raise NotPossibleHere(f"no control group with a limit ({controller})")


def _little_memory() -> contextlib.AbstractContextManager[Path]:
    limit = str(MEMORY_LIMIT_BYTES)
    return _group("memory", ("memory.limit_in_bytes", limit), ("memory.max", limit))


def _slow_disk() -> contextlib.AbstractContextManager[Path]:
    """Virtual disks lie in the memory of their hosts: this one gets as slow as a disk."""
    number = Path(tempfile.gettempdir()).stat().st_dev
    disk = f"{os.major(number)}:{os.minor(number)}"
    v1 = ("blkio.throttle.read_iops_device", f"{disk} {READS_PER_S}")
    return _group("blkio", v1, ("io.max", f"{disk} riops={READS_PER_S}"))


# --------------------------------------------------------------------------- comparing


def problems(seen: Observation) -> list[str]:
    """What Fulltilt got wrong, in words; empty when everything is right."""
    return [*_wrong_end(seen), *_wrong_cause(seen), *_wrong_counts(seen), *_wrong_times(seen)]


def _wrong_end(seen: Observation) -> Iterator[str]:
    specimen = seen.specimen
    if seen.exit_code != specimen.exit_code:
        yield f"exit code {seen.exit_code}, not the job's own {specimen.exit_code}"
    if specimen.says and specimen.says not in seen.errors:
        yield f"the job's own last words are missing from its stderr: {specimen.says}"
    traceback = seen.errors.partition("Traceback")[2]
    if "fulltilt/recorder" in traceback and specimen.says is None:
        yield "a traceback of Fulltilt's own"


def _wrong_cause(seen: Observation) -> Iterator[str]:
    code, where = seen.found.get("code", seen.answer["verdict"]["code"]), seen.found.get("where")
    if code != seen.specimen.code:
        yield f"the first finding is {code}, not {seen.specimen.code}"
    also = [finding for finding in seen.answer["findings"] if finding["code"] == seen.specimen.also]
    if seen.specimen.also is not None:
        where = also[0]["where"] if also else None
        if not also:
            yield f"{seen.specimen.also} is not among the findings"
    marked = seen.specimen.marked_lines()
    if marked and (where is None or Path(where).name not in marked):
        yield f"the cause stands at {' or '.join(sorted(marked))}, not at {where}"


def _wrong_counts(seen: Observation) -> Iterator[str]:
    truth, throughput = seen.truth, seen.answer["throughput"]
    samples = truth["samples"] if seen.specimen.counts_samples else None
    if seen.specimen.lost_s:
        lost = truth["steps"] - throughput["steps"]
        most = seen.specimen.lost_s * truth["steps"] / truth["seconds"]
        if not 0 <= lost <= most:
            yield f"{throughput['steps']} steps of {truth['steps']}: at most {most:.0f} may be lost"
        return
    if throughput["steps"] != truth["steps"]:
        yield f"{throughput['steps']} steps, not {truth['steps']}"
    if throughput["samples"] != samples:
        yield f"{throughput['samples']} samples, not {samples}"
    skipped = sum(span.skipped_steps for span in seen.run.spans[0])
    if skipped != truth.get("skipped", 0):
        yield f"{skipped} skipped steps, not {truth.get('skipped', 0)}"


def _wrong_times(seen: Observation) -> Iterator[str]:
    rate, true_rate = seen.rates
    if not seen.specimen.too_short_to_rate and (rate is None or abs(rate / true_rate - 1) > RATE_TOLERANCE):
        yield f"{rate} a second, not {true_rate:.2f}"
    if seen.unattributed_share > UNATTRIBUTED_TOLERANCE:
        yield f"{seen.unattributed_share:.1%} of the wall time are unattributed"
    lost = seen.specimen.lost_s / seen.truth["seconds"]
    for bucket in seen.specimen.measured:
        true_share = seen.truth["parts"][bucket] / seen.truth["seconds"]
        low, high = true_share * (1 - lost) - SHARE_TOLERANCE, true_share + SHARE_TOLERANCE
        if not low <= seen.share(bucket) <= high:
            yield f"{bucket} takes {seen.share(bucket):.1%} of the training part, not {true_share:.1%}"
    for bucket, (low, high) in seen.specimen.shares.items():
        if not low <= seen.share(bucket) <= high:
            yield f"{bucket} takes {seen.share(bucket):.1%} of the training part, not {low:.0%} to {high:.0%}"
