import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fulltilt.cli.plan import show
from fulltilt.errors import UsageError
from fulltilt.records import MemoryRecord, Run
from fulltilt.tuning.plan import (
    CONTEXT_BYTES,
    GPU_GIB,
    Plan,
    find_gpus,
    make_plan,
    parse_target,
    read_history,
    vram_budget,
    with_target,
)
from tests.diagnosis.examples import gpu, gpu_rank, host, loader, machine, rank, run_of, sampled, spans_of, workers

MIB = 1 << 20
GIB = 1 << 30
# 100 MiB of weights, as much of gradients, twice that of Adam's states; 50 MiB of frozen weights.
PARTS = MemoryRecord(26_214_400, 100 * MIB, 100 * MIB, 200 * MIB, 50 * MIB)
EACH = 20 * MIB
WORKSPACE = 64 * MIB


def observed(batch: int, compute_s: float = 100.0) -> Run:
    """A run at a batch size whose memory follows 450 + 64 + 20 · batch MiB."""
    trained = gpu_rank(
        loaders=(loader(batch_size=batch, num_workers=4, batch_bytes=batch * 1000),),
        workers=(workers(processes=4, pss_bytes=300 * MIB),),
        memory=PARTS,
        vram_peak_bytes=PARTS.resident_bytes + WORKSPACE + EACH * batch,
        learning_rate=4e-4,
        optimizers=("AdamW",),
        gpu_busy_step_s=compute_s / 1000,
    )
    reading = gpu(vram_total_bytes=141 * GIB)
    return run_of(trained, samples=sampled(reading), on=machine(gpus=(reading,)), compute=compute_s)


def test_two_batch_sizes_tell_activations_from_workspace() -> None:
    budget = vram_budget([observed(8), observed(32)])
    assert budget is not None
    assert budget.fitted_at == (8, 32)
    assert budget.activations_bytes_per_sample == pytest.approx(EACH)
    assert budget.workspace_bytes == pytest.approx(WORKSPACE, rel=0.01)
    assert budget.needed_bytes(64) == pytest.approx(PARTS.resident_bytes + WORKSPACE + 64 * EACH, rel=0.01)


def test_runs_of_two_models_are_not_one_line() -> None:
    other = observed(32)
    grown = replace(other.ranks[0], memory=replace(PARTS, parameters=7))
    with pytest.raises(UsageError, match=r"b and a trained different models: 7 and 26,214,400 parameters"):
        make_plan([replace(observed(8), folder="a"), replace(other, folder="b", ranks=(grown,))])


def test_a_run_of_which_no_process_was_recorded_is_refused() -> None:
    with pytest.raises(UsageError, match="no training process of a was recorded"):
        make_plan([observed(8), replace(observed(16), folder="a", ranks=())])


def test_one_batch_size_never_promises_too_much() -> None:
    one, two = vram_budget([observed(8)]), vram_budget([observed(8), observed(32)])
    assert one is not None
    assert two is not None
    eight_gib = one.largest_batch(8 * GIB), two.largest_batch(8 * GIB)
    assert eight_gib[0] is not None
    assert eight_gib[1] is not None
    assert 0 < eight_gib[0] < eight_gib[1]
    true_need = PARTS.resident_bytes + WORKSPACE + EACH * eight_gib[1] + CONTEXT_BYTES
    assert true_need <= 8 * GIB


def test_a_model_that_does_not_fit_has_no_batch() -> None:
    huge = replace(PARTS, optimizer_bytes=20 * GIB)
    run = observed(8)
    grown = replace(run.ranks[0], memory=huge, vram_peak_bytes=huge.resident_bytes + 8 * EACH)
    plan = make_plan([replace(run, ranks=(grown,))])
    small = next(row for row in plan.gpus if row.gpu == "RTX 3070")
    assert small.largest_batch == 0
    assert small.fits is False


def test_a_batch_that_does_not_fit_elsewhere_is_kept_in_equal_parts() -> None:
    plan = make_plan([observed(450), observed(90)])
    gpus = {row.gpu: row for row in plan.gpus}
    small, large = gpus["RTX 3070"], gpus["A100 80GB"]
    assert small.largest_batch is not None
    assert 225 <= small.largest_batch < 450
    assert (small.fits, small.accumulation) == (False, (2, 225))
    assert (large.fits, large.accumulation) == (True, None)

    console = Console(record=True, width=160)
    show(console, plan)
    lines = console.export_text().splitlines()
    heading = next(line for line in lines if "batch 450 as" in line)
    row = next(line for line in lines if line.startswith("RTX 3070"))
    assert row.index("2 × 225") + len("2 × 225") == heading.index("batch 450 as") + len("batch 450 as")


def test_the_plan_names_batches_rates_and_what_workers_hold() -> None:
    plan = make_plan([observed(8)])
    assert plan.gpu == "NVIDIA H200"
    assert [row.batch for row in plan.batches[:3]] == [8, 16, 32]
    doubled = plan.batches[1]
    assert doubled.learning_rate is not None
    assert doubled.learning_rate.arithmetic == "0.0004 × sqrt(16/8) = 0.000566"
    four = next(row for row in plan.loading if row.workers == 4)
    assert four.workers_bytes == 4 * 300 * MIB
    assert four.queued_batches == 4 * (loader().prefetch_factor or 2)
    assert any("one batch size (8)" in lack for lack in plan.lacks)
    console = Console(width=120, file=io.StringIO())
    show(console, plan)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "from batch 16 on the rate is much higher: warm up to it over the first 3 epochs" in said


def test_a_run_without_a_gpu_says_what_it_lacks() -> None:
    plan = make_plan([run_of(rank(), compute=100.0)])
    assert plan.vram is None
    assert plan.gpus == ()
    assert any("no GPU" in lack for lack in plan.lacks)


def test_hours_go_with_speed_but_never_faster_than_the_loader() -> None:
    plan = replace(make_plan([observed(8), observed(32)]), loader_samples_per_s=400.0)
    slow, fast = (replace(plan.batches[0], samples_per_s=rate) for rate in (100.0, 1000.0))
    timed = with_target(replace(plan, batches=(slow, fast)), (1.0, 2.0), reached_at=200.0)
    assert [row.hours for row in timed.batches] == [(2.0, 4.0), (0.5, 1.0)]


def test_history_is_read_from_a_table_and_from_hugging_face(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,seconds,iou,mae\n1,60,0.5,\n2,80,0.6,0.1\n")
    history = read_history([tmp_path], "iou")
    assert history == (((1.0, 0.5), (2.0, 0.6)), 70.0)
    theirs = tmp_path / "hf" / "checkpoint-20"
    theirs.mkdir(parents=True)
    log = [{"epoch": 1.0, "eval_f1": 0.4}, {"epoch": 2.0, "eval_f1": 0.5, "note": "x"}]
    (theirs / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    assert read_history([tmp_path / "hf"], "eval_f1")[0] == ((1.0, 0.4), (2.0, 0.5))
    (tmp_path / "hf" / "metrics.csv").write_text("accuracy,epoch,step,train_loss\n,0,9,1.2\n0.7,0,9,\n0.8,1,19,\n")
    assert read_history([tmp_path / "hf"], "accuracy")[0] == ((0.0, 0.7), (1.0, 0.8))
    with pytest.raises(UsageError, match="no history of auc") as caught:
        read_history([tmp_path], "auc")
    assert "iou, mae" in str(caught.value)


def test_a_history_with_gaps_is_read_all_the_same(tmp_path: Path) -> None:
    """Excel's mark at the beginning, epochs that diverged, and what is no history at all."""
    written = "\ufeffepoch,seconds,iou\n1,60,0.5\n2,nan,nan\n3,60,inf\n4,60,0.6\n"
    (tmp_path / "metrics.csv").write_text(written, encoding="utf-8")
    history = read_history([tmp_path], "iou")
    assert history == (((1.0, 0.5), (4.0, 0.6)), 60.0)
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "trainer_state.json").write_text('{"log_history": 5}')
    with pytest.raises(UsageError, match="no history of iou"):
        read_history([tmp_path], "iou")


@pytest.mark.parametrize("text", ["iou", "=0.5", "iou=", "iou=high", "iou=nan"])
def test_a_target_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="not METRIC=VALUE"):
        parse_target(text)


def test_smaller_is_better_for_errors() -> None:
    assert parse_target("val_loss=0.2").mode == "min"
    assert parse_target("iou=0.75").mode == "max"


def test_a_metric_that_was_never_finite_is_told(tmp_path: Path) -> None:
    """There is a history, and it was said that there is none."""
    (tmp_path / "metrics.csv").write_text("epoch,iou,seconds\n1,nan,60\n2,nan,60\n")
    with pytest.raises(UsageError, match="iou was never a finite number"):
        read_history([tmp_path], "iou")
    with pytest.raises(UsageError, match="no history of loss") as error:
        read_history([tmp_path], "loss")
    assert error.value.remedy == "There are: iou"


def test_each_rank_has_workers_of_its_own() -> None:
    """Their queue lasts as long as one rank takes to use it, and the machine has to hold the workers of all."""
    samples = sampled(host_reading=host(mem_used_bytes=0))
    on = machine(mem_total_bytes=2 * GIB, mem_limit_bytes=None)

    def plan_of(count: int) -> Plan:
        ranks = [
            rank(number, loaders=(loader(num_workers=4, batch_bytes=1000),), workers=(workers(pss_bytes=400 * MIB),))
            for number in range(count)
        ]
        return make_plan([run_of(*ranks, samples=samples, on=on, compute=100.0)])

    alone, both = plan_of(1), plan_of(2)
    assert alone.samples_per_s is not None
    assert both.samples_per_s == pytest.approx(2 * alone.samples_per_s)
    four, of_each = (next(row for row in plan.loading if row.workers == 4) for plan in (alone, both))
    assert of_each.buffer_s == pytest.approx(four.buffer_s)
    assert (four.fits, of_each.fits) == (True, False)
    assert both.ranks == 2


@pytest.mark.parametrize(("steps", "lack"), [(1, "one step"), (0, "no step")])
def test_one_step_tells_no_speed(steps: int, lack: str) -> None:
    """It was rated without the wait for its batch: 3125 samples/s of a loader that gives 431."""
    plan = make_plan([run_of(rank(loaders=(loader(),)), spans=(spans_of(steps=steps, compute=0.005),))])
    assert plan.samples_per_s is None
    assert any(f"trained {lack}: its speed is unknown" in each for each in plan.lacks)
    assert all(row.buffer_s is None for row in plan.loading)


# --------------------------------------------------------------------------- other GPUs


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RTX 3070", ["RTX 3070"]),
        ("NVIDIA GeForce RTX 3070", ["RTX 3070"]),
        ("rtx3090", ["RTX 3090"]),
        ("4070", ["RTX 4070"]),
        ("RTX 4070Ti", ["RTX 4070 Ti"]),
        ("A6000", ["RTX A6000"]),
        ("v100", ["Tesla V100 16GB", "Tesla V100 32GB"]),
        ("A100", ["A100 40GB", "A100 80GB"]),
        ("NVIDIA A100-SXM4-80GB", ["A100 80GB"]),
        ("A10", ["A10"]),
        ("H200 NVL", ["H200 NVL"]),
        # Another chip under the same number: its memory is its own, or not known.
        ("RTX 3070 Ti", []),
        ("RTX 4080 SUPER", []),
        ("RTX 3070 Laptop GPU", []),
        ("H100 MIG 3g.40gb", []),
        ("AMD Instinct MI300X", []),
        ("RTX", []),
    ],
)
def test_gpus_go_by_the_names_that_people_write(name: str, expected: list[str]) -> None:
    assert find_gpus(name) == expected


@pytest.mark.parametrize(("name", "driver_mib"), [("T4", 15360), ("A10G", 23028), ("L4", 23034), ("L40S", 46068)])
def test_error_correction_takes_its_part_of_a_servers_memory(name: str, driver_mib: int) -> None:
    """As nvidia-smi shows them: what the data sheet adds is no room for a batch."""
    (found,) = find_gpus(name)
    assert GPU_GIB[found] == pytest.approx(driver_mib / 1024, rel=0.01)
