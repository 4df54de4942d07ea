"""What `fulltilt run` does beside the job: samples the machine, shows one status line, warns when the GPU starves."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType

from fulltilt import store
from fulltilt.cli.statusbar import StatusBar
from fulltilt.cli.streams import tell
from fulltilt.diagnosis import low_gpu_warning
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe, cpu_capacity
from fulltilt.probes.sampler import Sampler
from fulltilt.recorder.rank_files import WARN_AFTER_S, Following
from fulltilt.records import Sample
from fulltilt.report.status import status_line

LOOK_EVERY_S = 1.0


class Watching:
    """Samples the machine into the run folder and tells how the job fares for as long as it runs."""

    def __init__(self, folder: Path, pid: int, t0_ns: int, gpus: Gpus) -> None:
        self._folder = folder
        self._t0_ns = t0_ns
        self._writer: store.LineWriter | None = None
        self._sampler = Sampler(self._take, gpus=gpus, host=HostProbe(pid), t0=t0_ns * 1e-9)
        self._samples: deque[Sample] = deque(maxlen=int(WARN_AFTER_S))
        self._progress = Following(folder)
        self._bar = StatusBar(sys.stderr)
        self._next_look = 0.0
        self._warned = False

    def _take(self, sample: Sample) -> None:
        self._samples.append(sample)
        if self._writer is None:  # opened here, where the sampler takes what fails
            self._writer = store.LineWriter(self._folder / store.SAMPLES_FILE)
        self._writer.write([sample])

    def __enter__(self) -> Watching:
        with contextlib.suppress(Exception):  # no thread left; the job runs already and is to be waited for
            self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        with contextlib.suppress(Exception):
            self._sampler.stop()
        if self._writer is not None:
            self._writer.close()

    def tick(self) -> None:
        """Called a few times a second; does something once a second."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        with contextlib.suppress(Exception):  # the job comes first; a damaged folder is told at the end
            self._progress.read()
            self._warn_once()
            if self._bar.on and self._samples:
                self._bar.show(f"fulltilt · {self._progress.words()} · {status_line(self._samples[-1])}")

    def _warn_once(self) -> None:
        """Row E2: little GPU use, said while the job runs."""
        trained = self._progress.recent_buckets(WARN_AFTER_S)
        if self._warned or trained.total_s - trained.startup_s < WARN_AFTER_S:
            return
        self._warned = True
        used = [gpu.util_pct for sample in self._samples for gpu in sample.gpus if gpu.util_pct is not None]
        util_pct = sum(used) / len(used) if used and self._progress.on_gpu else None
        if self._progress.on_gpu and util_pct is None:
            return
        loader = next((loader for loader in self._progress.loaders if loader.role == "train"), None)
        warning = low_gpu_warning(util_pct, trained, loader, cpu_capacity().usable)
        if warning is not None:
            self._bar.close()
            tell(warning)
