from typing import Any

import pytest

from fulltilt.diagnosis import answer
from fulltilt.diagnosis.checklist import asked_batch_size
from fulltilt.records import CheckLine, Run, Settings
from tests.diagnosis.examples import gpu, gpu_rank, loader, rank, run_of, sampled

COMMAND = ("train.py", "--batch_size", "32")


def lines(run: Run) -> dict[str, CheckLine]:
    return {line.name: line for line in answer(run).checklist}


def healthy(**changes: Any) -> Run:
    return run_of(
        gpu_rank(gpu_busy_step_s=0.095, vram_peak_bytes=45 * 2**30, **changes),
        samples=sampled(gpu(vram_total_bytes=80 * 2**30)),
        run={"command": COMMAND},
        compute=95.0,
        host_code=5.0,
    )


def test_a_healthy_run_passes_every_line_with_its_figure() -> None:
    assert [(line.name, line.state, line.figure) for line in answer(healthy()).checklist] == [
        ("Batch size as asked", "ok", "Batch size: 32 (expected: 32)"),
        ("GPU memory use > 30 %", "ok", "GPU Memory - Peak: 45.00 GB (56% of 80GB)"),
        ("GPU use > 80 %", "ok", "GPU utilization: 97%, SMs active 85%"),
        (
            "Speed > 80 % of the compute ceiling",
            "ok",
            "Epoch time: 100s (320 samples/sec, 10 batches/sec), 95 % of the 337 that compute alone would reach",
        ),
        ("Data wait < 10 %", "ok", "Data wait: 0 % of the time after start-up"),
    ]


def test_a_starved_run_fails_with_remedies() -> None:
    run = run_of(
        gpu_rank(vram_peak_bytes=2 * 2**30, loaders=(loader(batch_size=16, samples=16_000),)),
        samples=sampled(gpu(vram_total_bytes=80 * 2**30, util_pct=11.0, sm_active_pct=None)),
        run={"command": COMMAND},
        data_wait=62.0,
        compute=38.0,
    )
    checked = lines(run)
    assert {line.state for line in checked.values()} == {"fail"}
    assert checked["Batch size as asked"].figure == "Batch size: 16 (expected: 32)"
    assert checked["GPU memory use > 30 %"].figure == "GPU Memory - Peak: 2.00 GB (2% of 80GB)"
    assert checked["GPU use > 80 %"].figure == "GPU utilization: 11%"
    assert checked["Data wait < 10 %"].figure == "Data wait: 62 % of the time after start-up"
    assert all(line.remedy for line in checked.values())


def test_without_a_gpu_its_lines_are_left_out_and_the_others_stay() -> None:
    checked = lines(run_of(rank(), compute=100.0))
    assert checked["GPU memory use > 30 %"] == CheckLine("GPU memory use > 30 %", "skip", "no GPU in use")
    assert checked["GPU use > 80 %"].state == "skip"
    assert checked["Batch size as asked"].figure == "Batch size: 32 (none asked for on the command line)"
    assert checked["Speed > 80 % of the compute ceiling"].state == "ok"


def test_a_run_without_anything_skips_every_line() -> None:
    assert {line.state for line in answer(run_of()).checklist} == {"skip"}


def test_the_batch_of_all_ranks_together_is_as_asked_too() -> None:
    ranks = [gpu_rank(n, world_size=2) for n in range(2)]
    run = run_of(*ranks, run={"command": ("train.py", "--batch-size=64")})
    assert lines(run)["Batch size as asked"].figure == "Batch size: 64 = 2 ranks × 32 (expected: 64)"


def test_settings_asked_for_come_before_the_command_line() -> None:
    run = run_of(rank(), run={"command": COMMAND, "asked": Settings(batch_size=48)})
    assert lines(run)["Batch size as asked"].figure == "Batch size: 32 (expected: 48)"


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        (("train.py", "--batch-size", "8", "--stage2-batch-size", "4"), 8),
        (("train.py", "--batch_size=128"), 128),
        (("train.py", "-b", "16", "--batch-size", "32"), 32),
        (("train.py", "--per_device_train_batch_size", "64"), 64),
        (("train.py", "batch_size=12"), 12),
        (("train.py", "--batch-size"), None),
        (("train.py", "--batch-size", "auto"), None),
        (("train.py", "--eval-batch-size", "8"), None),
    ],
)
def test_the_batch_size_on_a_command_line(command: tuple[str, ...], asked: int | None) -> None:
    assert asked_batch_size(command) == asked
