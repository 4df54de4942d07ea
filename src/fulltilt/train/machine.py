"""One look at the machine a second for all who want to know: the screen, the run folder, the warning of an idle GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.probes.sampler import Sampler
from fulltilt.recorder.run_files import job_root
from fulltilt.records import Sample

Listener = Callable[[Sample], None]


class MachineWatch:
    """Samples the machine inside its ``with`` block and tells every listener; without listeners it does nothing."""

    def __init__(self, t0_ns: int) -> None:
        self.listeners: list[Listener] = []
        self._t0_ns = t0_ns
        self._sampler: Sampler | None = None

    @cached_property
    def gpus(self) -> Gpus:
        """The GPUs of the job, opened when they are first asked for: the driver may take its time."""
        return Gpus.open(root_pid=job_root())

    def __enter__(self) -> MachineWatch:
        if self.listeners:
            self._sampler = Sampler(self._tell, gpus=self.gpus, host=HostProbe(job_root()), t0=self._t0_ns * 1e-9)
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A thread that is still in the driver would read on in what closing gives back: the process would crash.
        if self._sampler is not None and self._sampler.stop():
            self.gpus.close()

    def _tell(self, sample: Sample) -> None:
        for listener in self.listeners:
            listener(sample)
