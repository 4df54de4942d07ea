import subprocess
import sys
from importlib import metadata

from fulltilt.probes.gpu import Gpus
from fulltilt.probes.machine import describe_machine, torch_versions
from fulltilt.records import Machine
from fulltilt.store import decode, encode
from fulltilt.testing import no_driver, two_t4s


def test_a_machine_with_gpus_is_described():
    gpus = Gpus.open(two_t4s(), environ={})
    machine = describe_machine(gpus)
    assert (machine.driver, machine.driver_cuda, machine.why_no_gpu) == ("570.86.15", "12.8", None)
    assert [gpu.name for gpu in machine.gpus] == ["Tesla T4", "Tesla T4"]
    assert machine.cpu.usable > 0
    assert machine.mem_total_bytes > 0
    assert gpus.read(), "the session is the caller's, and stays open"
    assert decode(Machine, encode(machine)) == machine


def test_a_machine_without_gpus_says_why():
    machine = describe_machine(Gpus.open(no_driver()))
    assert machine.gpus == ()
    assert "no NVIDIA driver" in machine.why_no_gpu


def test_versions_are_those_that_torch_tells_itself():
    import torch

    assert torch_versions() == (torch.__version__, torch.version.cuda)


def test_without_torch_there_is_no_version(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert torch_versions() == (None, None)


def test_the_probes_do_not_import_torch():
    code = (
        "import sys, fulltilt.probes.machine as m, fulltilt.probes.sampler, fulltilt.probes.storage;"
        "m.describe_machine(m.Gpus.open()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
