"""A record of the machine, made without importing torch."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import socket
from pathlib import Path

import psutil

from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import cpu_capacity, memory_limit_bytes, shared_memory_bytes
from fulltilt.records import Machine


def describe_machine(gpus: Gpus) -> Machine:
    """Everything known about this machine."""
    torch, cuda = torch_versions()
    shm_total_bytes, shm_free_bytes = shared_memory_bytes()
    return Machine(
        hostname=socket.gethostname(),
        platform=platform.platform(),
        python=platform.python_version(),
        torch=torch,
        cuda=cuda,
        driver=gpus.driver,
        cpu=cpu_capacity(),
        mem_total_bytes=int(psutil.virtual_memory().total),
        mem_limit_bytes=memory_limit_bytes(),
        shm_total_bytes=shm_total_bytes,
        shm_free_bytes=shm_free_bytes,
        gpus=gpus.read(),
        driver_cuda=gpus.cuda,
        why_no_gpu=gpus.why_none,
    )


def torch_versions() -> tuple[str | None, str | None]:
    """The versions of torch and of its CUDA, read from torch's files; None where there is none."""
    try:
        torch = importlib.metadata.distribution("torch")
        # The wheel's metadata may lack the local part (+cu128) that the module itself shows.
        text = Path(str(torch.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    except OSError:
        return torch.version, None
    version = re.search(r"^__version__\b[^=]*=\s*['\"](.+?)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"](.+?)['\"]", text, re.MULTILINE)
    return version[1] if version else torch.version, cuda[1] if cuda else None
