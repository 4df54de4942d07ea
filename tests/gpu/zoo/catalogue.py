"""What is known about each job of the zoo that needs a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.zoo.catalogue import COMPUTES, Specimen

GpuSpecimen = partial(Specimen, folder=Path(__file__).parent, on_gpu=True)

CATALOGUE = (
    GpuSpecimen("slow_loader.py", "input_io_bound", shares={"data_wait": (0.85, 1.05)}),
    GpuSpecimen("item_every_step.py", "sync_point", shares={"sync": (0.05, 0.6)}, counts_samples=False),
    GpuSpecimen("if_every_gradient.py", "sync_point", shares={"sync": (0.05, 0.8)}, counts_samples=False),
    GpuSpecimen("pageable_copies.py", "transfer_blocking", shares={"transfer": (0.3, 1.05)}),
    GpuSpecimen("batch_of_one.py", "launch_bound", shares={"host_code": (0.3, 1.0)}),
    GpuSpecimen("float32_matmuls.py", "precision_unused", shares=COMPUTES, counts_samples=False),
    GpuSpecimen("small_batch.py", "batch_too_small", shares={"compute": (0.65, 1.05)}),
    GpuSpecimen("sleep_after_step.py", "host_code", measured=("host_code",)),
    GpuSpecimen("validate_often.py", "validation_heavy", measured=("validation",)),
    GpuSpecimen("sampled_model.py", "validation_heavy", measured=("validation",)),
    GpuSpecimen("save_often.py", "checkpoint_stall", measured=("checkpoint",), counts_samples=False),
    GpuSpecimen("launch_beside_workers.py", "launch_contended"),
    GpuSpecimen("channels_first.py", "free_switches", counts_samples=False),
    GpuSpecimen("large_compute.py", "compute_bound", shares=COMPUTES),
    GpuSpecimen("shared_gpu.py", "gpu_shared", surroundings="neighbour"),
)
