"""What `fulltilt run` does beside the job: samples the machine, shows one status line, warns when the GPU starves."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from fulltilt import store
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.probes.sampler import Sampler
from fulltilt.records import Sample


class Watching:
    """Samples the machine into the run folder for as long as the job runs."""

    def __init__(self, folder: Path, pid: int, t0_ns: int, gpus: Gpus) -> None:
        self._folder = folder
        self._writer = store.LineWriter(folder / store.SAMPLES_FILE)
        self._last: Sample | None = None
        self._sampler = Sampler(self._take, gpus=gpus, host=HostProbe(pid), t0=t0_ns * 1e-9)
        self._began = time.monotonic()

    def _take(self, sample: Sample) -> None:
        self._last = sample
        self._writer.write([sample])

    def __enter__(self) -> Watching:
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sampler.stop()
        self._writer.close()

    def tick(self) -> None:
        """Called a few times a second."""
