"""Row E2 while a training runs: little GPU use, the likely bottleneck, the settings in force; once for each cause."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from fulltilt.diagnosis.low_gpu import likely_cause, low_gpu_warning
from fulltilt.errors import RunFolderError
from fulltilt.probes.host import cpu_capacity
from fulltilt.recorder.following import WARN_AFTER_S, Following
from fulltilt.recorder.loader_tap import ENGINE
from fulltilt.records import Buckets, LoaderRecord, Sample
from fulltilt.train.progress import Screen
from fulltilt.train.settings import TrainSettings

NAMED = ("batch_size", "accumulation", "workers", "prefetch", "residency", "precision", "compile", "channels_last")


class IdleGpu:
    """Listens to the samples of a training on a GPU. ``recorded`` is its run folder, None when there is none."""

    def __init__(self, settings: TrainSettings, screen: Screen, recorded: Path | None) -> None:
        self._settings, self._screen = settings, screen
        self._following = Following(recorded) if recorded is not None else None
        self._usable_cpus = cpu_capacity().usable
        self._samples: deque[Sample] = deque(maxlen=int(WARN_AFTER_S))
        self._told: set[str] = set()

    def __call__(self, sample: Sample) -> None:
        """Take one sample and warn if the last twenty seconds call for it."""
        self._samples.append(sample)
        used = [gpu.util_pct for one in self._samples for gpu in one.gpus if gpu.util_pct is not None]
        buckets = self._recent()
        if not used or buckets.total_s - buckets.startup_s < WARN_AFTER_S:
            return
        warning = low_gpu_warning(sum(used) / len(used), buckets, self._loader(), self._usable_cpus)
        cause = likely_cause(buckets, on_gpu=True)
        if warning is not None and cause not in self._told:
            self._told.add(cause)
            now = ", ".join(f"{name} {getattr(self._settings, name)}" for name in NAMED)
            for line in (*warning.splitlines(), f"   - Settings in force: {now}"):
                self._screen.say(line)

    def _recent(self) -> Buckets:
        if self._following is None:
            return self._screen.epoch_so_far()
        try:
            self._following.read()
        except RunFolderError:
            return Buckets()  # told at the end; the training comes first
        return self._following.recent_buckets(WARN_AFTER_S)

    def _loader(self) -> LoaderRecord:
        settings, waits_s = self._settings, self._screen.waits_s
        return LoaderRecord(
            loader_id=0,
            role="train",
            where=None,
            dataset="",
            dataset_len=None,
            iterable=False,
            batch_size=settings.batch_size,
            num_workers=settings.workers,
            prefetch_factor=settings.prefetch,
            pin_memory=True,
            persistent_workers=True,
            drop_last=settings.drop_last,
            shuffle=True,
            sampler=None,
            collate=None,
            start_method=None,
            made_by=ENGINE,
            batches=len(waits_s),
            wait_s=sum(waits_s),
        )
