"""One training step laid out for drawing: who does what, from when to when."""

from __future__ import annotations

from dataclasses import dataclass

from fulltilt.diagnosis.loaders import joined
from fulltilt.records import Diagnosis, LoaderRecord, Phases, RankRecord, Run, WorkerRecord
from fulltilt.report.palette import IDLE

Site = tuple[LoaderRecord, tuple[WorkerRecord, ...]]


def loader_sites(rank: RankRecord) -> list[Site]:
    """The loaders that gave batches, those of one line and role as one, each with the record of its workers."""
    groups: dict[object, list[LoaderRecord]] = {}
    for loader in rank.loaders:
        if loader.batches > 0:
            groups.setdefault((loader.where or loader.loader_id, loader.role), []).append(loader)
    return [joined(rank, same) for same in groups.values()]


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a lane. ``kind`` is a key of PHASE_TINTS."""

    kind: str
    start_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One of those who work at a step, and its parts in order."""

    name: str
    parts: tuple[Part, ...]

    @property
    def length_s(self) -> float:
        """From the start of the step to the end of the last part."""
        return max((part.start_s + part.length_s for part in self.parts), default=0.0)


@dataclass(frozen=True, slots=True)
class StepPicture:
    """The mean step. ``scale_s`` is the length of the longest lane, to which all of them are drawn."""

    step_s: float
    steps: int
    lanes: tuple[Lane, ...]

    @property
    def scale_s(self) -> float:
        """What the full width of the drawing stands for."""
        return max(self.step_s, *(lane.length_s for lane in self.lanes))


def step_picture(run: Run, diagnosis: Diagnosis) -> StepPicture | None:
    """The mean step of the first rank, or None when no step was recorded.

    Lengths are measured; the order within a lane is the usual one, and the GPU's work is drawn in one piece.
    """
    phases = diagnosis.step
    if phases is None or not run.ranks:
        return None
    site = _train_site(run.ranks[0])
    host = _host_lane(phases, None if site is None else site[0])
    gpu = _gpu_lane(phases)
    step_s = max(lane.length_s for lane in (host, gpu) if lane is not None)
    if step_s <= 0:
        return None
    workers = None if site is None else _worker_lane(site, run.ranks[0].steps, step_s)
    lanes = tuple(lane for lane in (workers, host, gpu) if lane is not None)
    # A run that was cut short has steps of which no phases were written.
    measured = sum(span.steps for span in (run.spans[0] if run.spans else ()) if span.phases is not None)
    return StepPicture(step_s, measured, lanes)


def _train_site(rank: RankRecord) -> Site | None:
    """Where the job trains from; with several loaders, the one that was waited for longest."""
    sites = [site for site in loader_sites(rank) if site[0].role == "train"]
    return max(sites, key=lambda site: site[0].wait_s, default=None)


def _host_lane(phases: Phases, loader: LoaderRecord | None) -> Lane:
    rest = [
        ("transfer", phases.transfer_s),
        ("forward", phases.forward_s),
        ("backward", phases.backward_s),
        ("optimizer", phases.optimizer_s),
        ("other", phases.other_s),
    ]
    if loader is None or loader.num_workers > 0:
        return _lane("Host", [("wait", phases.load_s), *rest])
    # Without workers the training process loads by itself: its CPU time meanwhile is preprocessing.
    preprocess_s = phases.load_s * min(loader.wait_cpu_s / loader.wait_s, 1.0) if loader.wait_s > 0 else 0.0
    return _lane("Host", [("load", phases.load_s - preprocess_s), ("preprocess", preprocess_s), *rest])


def _gpu_lane(phases: Phases) -> Lane | None:
    if phases.gpu_busy_s is None or phases.gpu_idle_s is None:
        return None
    return _lane("GPU", [(IDLE, phases.gpu_idle_s), ("busy", phases.gpu_busy_s)])


def _worker_lane(site: Site, steps: int, step_s: float) -> Lane | None:
    """What each worker does in the time of one step, all workers being equal."""
    loader, work = site[0], site[1][0] if site[1] else None
    if work is None or work.batches == 0 or loader.num_workers == 0 or steps == 0:
        return None
    # A worker's batches may be fewer than the loader's: what it had not told when it was stopped is missing.
    each = loader.batches / steps / loader.num_workers / work.batches
    queue_s = work.cpu_wait_s or 0.0
    load_s = max(work.fetch_s - work.fetch_cpu_s - queue_s, 0.0)
    busy = [("load", load_s * each), ("preprocess", work.fetch_cpu_s * each), ("queue", queue_s * each)]
    idle_s = max(step_s - sum(length for _, length in busy), 0.0)
    name = "Worker" if loader.num_workers == 1 else f"Each of {loader.num_workers} workers"
    return _lane(name, [*busy, (IDLE, idle_s)])


def _lane(name: str, lengths: list[tuple[str, float]]) -> Lane:
    parts = []
    start_s = 0.0
    for kind, length_s in lengths:
        if length_s > 0:
            parts.append(Part(kind, start_s, length_s))
            start_s += length_s
    return Lane(name, tuple(parts))
