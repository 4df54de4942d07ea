"""What is known about each job of the zoo: its cause, where that stands, and what it costs.

A script counts its own steps and samples and times its known parts with a stopwatch; where the cause is a line, the
line carries the comment ``# <- here``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ZOO = Path(__file__).parent


@dataclass(frozen=True)
class Specimen:
    """One job. ``measured`` names the buckets that the script timed itself; ``shares`` bounds others from its make-up.

    ``also`` is a code that must be among the findings, at its line. Shares are of the training part, from the end of
    the first step to the end of the last.
    """

    script: str
    code: str
    arguments: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    shares: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    launch: Literal["script", "module", "torchrun"] = "script"
    surroundings: Literal["plain", "small_shm", "little_memory", "slow_disk", "neighbour"] = "plain"
    marked_in: str | None = None
    counts_samples: bool = True
    exit_code: int = 0
    says: str | None = None
    also: str | None = None
    lost_s: float = 0.0
    too_short_to_rate: bool = False
    on_gpu: bool = False
    folder: Path = ZOO

    def __str__(self) -> str:
        return self.script.removesuffix(".py").replace("/", ".")

    @property
    def path(self) -> Path:
        """The script's file."""
        return self.folder / self.script

    def marked_lines(self) -> set[str]:
        """``file:line`` of the lines that are the cause; empty where it is none."""
        path = self.folder / (self.marked_in or self.script)
        lines = path.read_text(encoding="utf-8").splitlines()
        return {f"{path.name}:{number}" for number, line in enumerate(lines, start=1) if line.endswith("# <- here")}


COMPUTES = {"compute": (0.85, 1.05)}

CATALOGUE = (
    # -- the input
    Specimen("serial_waits.py", "input_serial", measured=("data_wait",)),
    Specimen("serial_decode.py", "input_serial", measured=("data_wait",)),
    Specimen("read_files.py", "input_serial", measured=("data_wait",)),
    Specimen("early_break.py", "input_serial", shares={"data_wait": (0.85, 1.05)}),
    Specimen("zip_loaders.py", "input_serial", measured=("data_wait",)),
    Specimen("generator_slow.py", "input_serial", measured=("data_wait",), counts_samples=False),
    Specimen("own_prefetch_slow.py", "input_serial", measured=("data_wait",)),
    Specimen("own_prefetch_python.py", "gil_contended", counts_samples=False),
    Specimen("worker_decode.py", "input_cpu_bound", measured=("data_wait",)),
    Specimen("worker_waits.py", "input_io_bound", measured=("data_wait",)),
    Specimen("cold_first_pass.py", "slow_storage", surroundings="slow_disk"),
    Specimen("iterable_workers.py", "input_io_bound", measured=("data_wait",)),
    Specimen("numpy_collate.py", "input_handover", measured=("data_wait",)),
    Specimen("tiny_epochs.py", "epoch_restart", measured=("epoch_turnover",)),
    Specimen("pickled_dataset.py", "epoch_restart", also="dataset_pickled", too_short_to_rate=True),
    # -- the script's own code
    # Compiling is start-up, which rates leave out.
    Specimen("recompiling.py", "recompiling", counts_samples=False, too_short_to_rate=True),
    Specimen("growing_history.py", "slowing_down", measured=("host_code",)),
    Specimen("collect_each_step.py", "gc_pauses", measured=("host_code",)),
    Specimen("sleep_after_step.py", "host_code", measured=("host_code",)),
    # Within forward only samples of the stack tell the parts: 250 of them, so that a tenth is four standard deviations.
    Specimen("sleep_in_forward.py", "host_code", shares={"host_code": (0.68, 0.88)}),
    Specimen("json_weights.py", "host_code", measured=("host_code",)),
    Specimen("python_metric.py", "host_code", measured=("host_code",)),
    Specimen("averaged_weights.py", "host_code", measured=("host_code",)),
    Specimen("train_in_thread.py", "host_code", measured=("host_code",)),
    Specimen("packaged/train.py", "host_code", measured=("host_code",), launch="module", marked_in="packaged/pause.py"),
    Specimen("validate_often.py", "validation_heavy", measured=("validation",)),
    Specimen("validate_sloppy.py", "validation_heavy", measured=("validation",)),
    Specimen("sampled_model.py", "validation_heavy", measured=("validation",)),
    Specimen("after_validation.py", "host_code", measured=("host_code", "validation")),
    Specimen("save_often.py", "checkpoint_stall", measured=("checkpoint",)),
    Specimen("save_safetensors.py", "checkpoint_stall", measured=("checkpoint",)),
    # -- the machine
    Specimen("oversubscribed.py", "cpu_oversubscribed", measured=("data_wait",)),
    Specimen("bound_to_one_cpu.py", "cpu_affinity", measured=("data_wait",)),
    Specimen("growing_workers.py", "worker_memory_growth"),
    Specimen("small_shm.py", "shm_small", shares=COMPUTES, surroundings="small_shm"),
    Specimen("hoarding.py", "memory_pressure", ("1790",), shares=COMPUTES, surroundings="little_memory"),
    # -- several ranks
    Specimen("ddp_healthy.py", "compute_bound", shares={"compute": (0.8, 1.05)}, launch="torchrun"),
    # Half of the ranks sleep three quarters of the time, the other half waits for them.
    Specimen(
        "ddp_straggler.py",
        "straggler",
        shares={"host_code": (0.33, 0.48), "communication": (0.25, 0.52)},  # one of two ranks waits, and both exchange
        launch="torchrun",
    ),
    # The search costs a per cent or two here: a remark, and never the first one.
    Specimen(
        "ddp_unused_search.py",
        "compute_bound",
        also="find_unused_parameters",
        shares={"compute": (0.7, 1.05)},
        launch="torchrun",
    ),
    Specimen("fsdp.py", "communication_bound", launch="torchrun"),
    Specimen("ddp_large_gradients.py", "communication_bound", shares={"communication": (0.3, 0.95)}, launch="torchrun"),
    # -- nothing wrong, counted right
    Specimen("healthy.py", "compute_bound", shares=COMPUTES),
    Specimen("gan.py", "compute_bound", shares=COMPUTES),
    Specimen("accumulation.py", "compute_bound", shares=COMPUTES),
    Specimen("scaler_skips.py", "compute_bound", shares=COMPUTES),
    Specimen("nested_loops.py", "compute_bound", shares=COMPUTES),
    Specimen("generator_fast.py", "compute_bound", shares=COMPUTES, counts_samples=False),
    Specimen("manual_sgd.py", "compute_bound", shares=COMPUTES),
    Specimen("lbfgs.py", "compute_bound", shares=COMPUTES),
    Specimen("detection_collate.py", "compute_bound", shares=COMPUTES),
    Specimen("custom_optimizer.py", "compute_bound", shares=COMPUTES),
    Specimen("own_prefetch.py", "compute_bound", shares=COMPUTES),
    Specimen("padded_text.py", "padding_waste", shares=COMPUTES),
    # -- bad ends
    Specimen(
        "crash.py", "input_serial", measured=("data_wait",), exit_code=1, says="ValueError: record 1000 is damaged"
    ),
    Specimen(
        "full_shm.py",
        "shm_small",
        surroundings="small_shm",
        exit_code=1,
        says="No space left on device",
        too_short_to_rate=True,
    ),
    # The recorder writes once a second: what came after the last time is lost with the process.
    Specimen("killed.py", "host_code", measured=("host_code",), exit_code=-9, lost_s=1.5),
)
