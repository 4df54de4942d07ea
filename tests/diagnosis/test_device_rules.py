from dataclasses import replace
from typing import Any

import pytest

from fulltilt.diagnosis import answer
from fulltilt.diagnosis.evidence import gather
from fulltilt.diagnosis.findings import rewritten
from fulltilt.diagnosis.rules.gpu import (
    batch_too_small,
    compute_bound,
    free_switches,
    instead_of,
    launch_bound,
    padding_waste,
    precision_unused,
    sync_point,
    transfer_blocking,
)
from fulltilt.records import (
    Abstention,
    CompileRecord,
    Finding,
    HotLine,
    KernelRecord,
    PrecisionRecord,
    Run,
    Settings,
    TransferRecord,
)
from tests.diagnosis.examples import gpu, gpu_rank, loader, rank, run_of, sampled, spans_of, workers

FP32 = PrecisionRecord(None, "float32", False, False)


def found(judgement: object) -> Finding:
    assert isinstance(judgement, Finding)
    return judgement


def on_gpu(reading: dict[str, Any] | None = None, seconds: dict[str, float] | None = None, **changes: Any) -> Run:
    return run_of(gpu_rank(**changes), samples=sampled(gpu(**(reading or {}))), **(seconds or {"compute": 100.0}))


@pytest.mark.parametrize("bucket", ["transfer", "sync", "host_code"])
def test_a_job_on_the_cpu_is_not_judged_by_a_gpu(bucket: str) -> None:
    told = answer(run_of(rank(), compute=80.0, **{bucket: 20.0}))
    codes = {judgement.code for judgement in (*told.findings, *told.abstained)}
    assert not codes & {"transfer_blocking", "sync_point", "launch_bound", "batch_too_small", "precision_unused"}
    assert not codes & {"throttled", "gpu_shared"}


@pytest.mark.parametrize(("worked_s", "cheaper"), [(155.0, True), (20.0, False)])
def test_compute_that_shares_its_cpus_with_workers_is_not_at_its_end(worked_s: float, cheaper: bool) -> None:
    loading = {"loaders": (loader(num_workers=2),), "workers": (workers(process_cpu_s=worked_s),)}
    finding = found(compute_bound(gather(run_of(rank(**loading), compute=95.0, data_wait=5.0))))
    assert ("Make decode (dataset.py:48) cheaper. Apart from that, only less" in finding.fix) == cheaper
    assert finding.fix.startswith("Compute sets the pace") != cheaper


# --------------------------------------------------------------------------- transfer_blocking


def copies(**changes: Any) -> TransferRecord:
    made = TransferRecord(2000, 38_000_000_000, pageable_share=1.0, blocking_share=1.0, where="train.py:40")
    return replace(made, **changes)


def test_pinning_a_loader_without_workers_draws_no_other_numbers() -> None:
    unpinned = loader(num_workers=0, pin_memory=False)
    evidence = gather(run_of(rank(loaders=(unpinned,)), compute=100.0))
    assert "augmentations" in rewritten(evidence, unpinned, num_workers=2)
    by_library = replace(unpinned, made_by="pytorch_metric_learning")
    assert rewritten(evidence, by_library, num_workers=2).startswith("pytorch_metric_learning makes this DataLoader; ")
    assert "augmentations" not in rewritten(evidence, unpinned, pin_memory=True)


def test_pageable_copies_should_be_pinned_and_not_wait() -> None:
    unpinned = (loader(num_workers=4, pin_memory=False),)
    run = on_gpu(None, {"transfer": 20.0, "compute": 80.0}, transfer=copies(), loaders=unpinned)
    finding = found(transfer_blocking(gather(run)))
    assert finding.share == pytest.approx(20 / 100)
    assert finding.where == "train.py:40"
    assert "2 copies a step, 18.1 MiB each, 100 % from pageable memory, 100 % blocking" in finding.evidence
    assert finding.fix == (
        "Pin the batches: DataLoader(..., pin_memory=True) at train.py:31 "
        "and copy without waiting: .to(device, non_blocking=True) at train.py:40."
    )
    assert finding.predicted_speedup == (1.11, 1.25)


def test_pinned_copies_that_do_not_wait_are_simply_large() -> None:
    good = copies(pageable_share=0.0, blocking_share=0.0)
    fix = found(transfer_blocking(gather(on_gpu(None, {"transfer": 20.0, "compute": 80.0}, transfer=good)))).fix
    assert "send uint8 or bfloat16 and convert on the GPU" in fix


def test_copies_that_hide_are_left_alone() -> None:
    assert transfer_blocking(gather(on_gpu(None, {"transfer": 4.0, "compute": 96.0}, transfer=copies()))) is None


def test_copies_of_unknown_kind_are_not_judged() -> None:
    judgement = transfer_blocking(gather(on_gpu(None, {"transfer": 20.0, "compute": 80.0})))
    assert judgement == Abstention("transfer_blocking", "how the batches were copied (pinned or not, blocking or not)")


# --------------------------------------------------------------------------- sync_point


def test_a_call_that_waits_for_the_gpu_is_named_with_its_cure() -> None:
    lines = (HotLine("train.py:52", "main", 3.0, "acc.cpu()"), HotLine("train.py:48", "main", 20.0, "loss.item()"))
    run = on_gpu(None, {"sync": 23.0, "compute": 77.0}, sync_lines=lines, syncs=2000)
    finding = found(sync_point(gather(run)))
    assert (finding.where, finding.severity) == ("train.py:48", "warn")
    assert "2 such calls a step" in finding.evidence
    assert "20 s in main, train.py:48 (loss.item())" in finding.evidence
    assert finding.fix == (
        "loss.item() at train.py:48: keep the value on the GPU (total += loss.detach()) and read it every 50 steps."
    )
    assert finding.predicted_speedup == (1.13, 1.3)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        ("torch.cuda.synchronize()", "delete it"),
        ("float(loss)", "read it every 50 steps"),
        ("pred.cpu()", "move them once every 50 steps"),
        ("mask.nonzero()", "torch.where"),
        ("torch.isnan(loss)", "check every 50 steps"),
        ("print(loss)", "print every 50 steps"),
        ("mystery(loss)", "do it every 50 steps"),
    ],
)
def test_each_kind_of_waiting_call_has_its_own_cure(call: str, part: str) -> None:
    assert part in instead_of(call, 0.2)


def test_rare_waits_are_left_alone() -> None:
    assert sync_point(gather(on_gpu(None, {"sync": 4.0, "compute": 96.0}, syncs=10))) is None


def test_waits_without_any_call_seen_are_not_judged() -> None:
    judgement = sync_point(gather(on_gpu(None, {"sync": 20.0, "compute": 80.0})))
    assert judgement == Abstention("sync_point", "the calls that waited for the GPU")


# --------------------------------------------------------------------------- launch_bound and batch_too_small


def test_gaps_between_kernels_are_launch_bound() -> None:
    kernels = KernelRecord(steps=9, busy_s=0.003, copies_s=0.0, kernels=1000, tensor_core_share=None)
    traced = {"kernels": kernels, "gpu_busy_step_s": 0.04, "launch_s": 55.0}
    run = on_gpu({"vram_used_bytes": 10**9}, {"host_code": 60.0, "compute": 40.0}, **traced)
    finding = found(launch_bound(gather(run)))
    assert finding.share == pytest.approx(92 / 100)  # 55 between events, and of 40 ms between those 37 in each step
    assert "1000 kernels a step of 3 µs each" in finding.evidence
    assert "in a step the GPU runs kernels for 3 ms, 37 ms are gaps between them" in finding.evidence
    assert 'torch.compile(model, mode="reduce-overhead")' in finding.fix
    assert "AdamW(..., fused=True)" in finding.fix
    assert finding.predicted_speedup == (1.85, 12.5)
    assert batch_too_small(gather(run)) is None
    assert [f.code for f in answer(run).findings] == ["launch_bound", "host_code"]


def test_what_breaks_a_compiled_graph_is_named_where_launching_limits() -> None:
    compiled = CompileRecord(3, 8.0, graph_breaks=2, break_reasons=("Unsupported Tensor.item() call",))
    run = on_gpu({"vram_used_bytes": 10**9}, {"host_code": 60.0, "compute": 40.0}, launch_s=55.0, compile=compiled)
    finding = found(launch_bound(gather(run)))
    assert "torch.compile broke the graph 2 times: Unsupported Tensor.item() call" in finding.evidence
    assert finding.fix.startswith("Fix what breaks the compiled graph: torch.compile(model, fullgraph=True)")


def test_few_gaps_are_left_alone_and_unmeasured_ones_not_judged() -> None:
    assert launch_bound(gather(on_gpu(launch_s=3.0))) is None
    assert launch_bound(gather(on_gpu(launch_s=None))) == Abstention(
        "launch_bound", "the GPU's idle time between kernels"
    )


def test_kernels_that_leave_multiprocessors_idle_want_a_larger_batch() -> None:
    gpu = {"util_pct": 80.0, "sm_active_pct": 20.0, "vram_used_bytes": 14 * 10**9}
    run = on_gpu(gpu, {"compute": 90.0, "host_code": 10.0})
    finding = found(batch_too_small(gather(run)))
    assert finding.share == pytest.approx(90 * 0.75 / 100)
    assert "while a kernel runs, 25 % of the SMs are active" in finding.evidence
    assert "10 % of the GPU's memory is in use" in finding.evidence
    assert "A suggestion, since it changes what is trained: try batch_size 32 → 64 at train.py:31" in finding.fix
    assert "`fulltilt plan RUN` shows which batches fit" in finding.fix
    assert finding.predicted_speedup == (1.51, 3.08)


def test_a_gpu_that_idles_between_full_kernels_wants_no_larger_batch() -> None:
    gpu = {"util_pct": 52.0, "sm_active_pct": 40.0, "vram_used_bytes": 10**9}
    assert batch_too_small(gather(on_gpu(gpu, {"compute": 70.0, "sync": 30.0}))) is None


def test_launches_just_below_the_limit_also_want_a_larger_batch() -> None:
    run = on_gpu({"sm_active_pct": None, "vram_used_bytes": 10**9}, {"compute": 92.0, "host_code": 8.0}, launch_s=8.0)
    assert found(batch_too_small(gather(run))).share == pytest.approx(8 / 100)


def test_full_multiprocessors_full_memory_or_little_compute_want_no_larger_batch() -> None:
    small = {"vram_used_bytes": 10**9}
    assert batch_too_small(gather(on_gpu(small))) is None
    assert batch_too_small(gather(on_gpu({"sm_active_pct": 25.0, "vram_used_bytes": 100 * 10**9}))) is None
    starved = on_gpu({**small, "sm_active_pct": 25.0}, {"compute": 40.0, "data_wait": 60.0})
    assert batch_too_small(gather(starved)) is None


def test_without_sm_activity_or_memory_use_the_batch_is_not_judged() -> None:
    dark = on_gpu({"sm_active_pct": None, "vram_used_bytes": 10**9})
    assert batch_too_small(gather(dark)) == Abstention("batch_too_small", "SM activity (GPM, on Hopper and newer)")
    unseen = on_gpu({"vram_used_bytes": None})
    assert batch_too_small(gather(unseen)) == Abstention("batch_too_small", "the GPU's memory in use")


# --------------------------------------------------------------------------- precision_unused


def test_float32_on_idle_tensor_cores_is_found() -> None:
    run = on_gpu({"tensor_active_pct": 0.0}, {"compute": 90.0, "host_code": 10.0}, precision=FP32)
    finding = found(precision_unused(gather(run)))
    assert "no autocast, parameters in float32, TF32 off" in finding.evidence
    assert "tensor cores are active 0 % of the training time" in finding.evidence
    assert 'torch.autocast("cuda", dtype=torch.bfloat16)' in finding.fix
    assert 'torch.set_float32_matmul_precision("high")' in finding.fix
    # 90 % of the time 1.3 to 3 times as fast.
    assert finding.predicted_speedup == (1.26, 2.5)


def test_tf32_leaves_less_to_win() -> None:
    tf32 = replace(FP32, tf32=True)
    finding = found(precision_unused(gather(on_gpu(precision=tf32))))
    assert finding.predicted_speedup == (1.1, 1.8)
    assert "set_float32_matmul_precision" not in finding.fix


def test_older_gpus_get_float16_with_a_scaler_or_nothing() -> None:
    t4 = found(precision_unused(gather(on_gpu({"name": "Tesla T4"}, precision=FP32))))
    assert 'dtype=torch.float16) with torch.amp.GradScaler("cuda")' in t4.fix
    assert precision_unused(gather(on_gpu({"name": "Tesla P100-PCIE-16GB"}, precision=FP32))) is None
    ada = found(precision_unused(gather(on_gpu({"name": "NVIDIA RTX 2000 Ada Generation"}, precision=FP32))))
    assert "bfloat16" in ada.fix


def test_autocast_half_parameters_and_starved_gpus_are_left_alone() -> None:
    assert precision_unused(gather(on_gpu())) is None
    assert precision_unused(gather(on_gpu(precision=PrecisionRecord(None, "bfloat16", None, False)))) is None
    assert precision_unused(gather(on_gpu(None, {"compute": 40.0, "data_wait": 60.0}, precision=FP32))) is None


def test_unknown_arithmetic_is_not_judged() -> None:
    assert precision_unused(gather(on_gpu(precision=None))) == Abstention(
        "precision_unused", "the arithmetic in use (autocast and the type of the parameters)"
    )


# --------------------------------------------------------------------------- padding_waste


def test_padding_is_counted_in_compute() -> None:
    padded = (loader(num_workers=2, padding_share=0.6),)
    finding = found(padding_waste(gather(on_gpu(None, {"compute": 90.0, "host_code": 10.0}, loaders=padded))))
    assert finding.share == pytest.approx(54 / 100)
    assert finding.evidence[0] == "60 % of what the batches hold is padding"
    assert "group_by_length" in finding.fix
    assert finding.predicted_speedup == (1.37, 2.17)


@pytest.mark.parametrize(
    ("dataset", "residency", "told"),
    [
        ("TextLoader", "auto", "already share a batch"),
        ("TextLoader", None, "already share a batch"),
        ("Comments", "none", "sort chunks of some hundred batches by length"),
    ],
)
def test_a_trainer_of_ours_is_not_told_to_group_by_length(dataset: str, residency: str | None, told: str) -> None:
    padded = (loader(num_workers=2, padding_share=0.6, dataset=dataset),)
    run = run_of(gpu_rank(loaders=padded), run={"asked": Settings(residency=residency)}, compute=100.0)
    finding = found(padding_waste(gather(run)))
    assert told in finding.fix
    assert ("group_by_length" in finding.fix) == (dataset == "Comments")


def test_batches_of_one_shape_without_texts_have_no_padding_to_judge() -> None:
    assert padding_waste(gather(on_gpu(loaders=(loader(batch_shapes=2),)))) is None
    assert isinstance(padding_waste(gather(on_gpu(loaders=(loader(batch_shapes=9),)))), Abstention)


def test_a_little_padding_is_left_alone_and_none_counted_is_not_judged() -> None:
    assert padding_waste(gather(on_gpu(loaders=(loader(padding_share=0.1),)))) is None
    assert padding_waste(gather(on_gpu())) == Abstention(
        "padding_waste", "a batch with an attention mask or padding to count"
    )


# --------------------------------------------------------------------------- compute_bound


def test_the_healthy_end_says_whether_a_full_gpu_is_really_full() -> None:
    run = on_gpu(None, {"compute": 95.0, "host_code": 5.0}, gpu_busy_step_s=0.095)
    finding = found(compute_bound(gather(run)))
    assert finding.share == pytest.approx(95 / 100)
    assert (finding.severity, finding.predicted_speedup) == ("info", None)
    assert "320 of at most 337 samples/s: 95 % of the compute ceiling" in finding.evidence
    assert "GPU 0 utilisation 97 % is real: SMs active 85 %" in finding.evidence
    hollow = found(compute_bound(gather(on_gpu({"sm_active_pct": 31.0})))).evidence[-1]
    assert hollow == "GPU 0 utilisation 97 % only says that some kernel ran: SMs active 31 %"
    dark = found(compute_bound(gather(on_gpu({"sm_active_pct": None})))).evidence[-1]
    assert dark.endswith("SM activity (Hopper and newer) was not measured")


def test_compute_on_the_cpu_is_divided_by_the_lines_that_it_starts_from() -> None:
    lines = [HotLine("train.py:9", "main", 60.0, "teacher(x)"), HotLine("train.py:8", "main", 8.0, "student(x)")]
    trained = rank(compute_lines=(HotLine("torch/nn/functional.py:1", "relu", 15.0), *lines))
    fix = found(compute_bound(gather(run_of(trained, compute=95.0, host_code=5.0)))).fix
    assert "Only less arithmetic (of which teacher(x) at train.py:9 63 %), fewer and larger operations" in fix


def test_a_job_that_mostly_waits_is_not_compute_bound() -> None:
    assert compute_bound(gather(on_gpu(None, {"compute": 45.0, "data_wait": 55.0}))) is None


def test_device_rules_abstain_without_steps() -> None:
    idle = run_of(gpu_rank(), spans=((spans_of()[0],),))
    lacking = {abstention.code: abstention.lacks for abstention in answer(idle).abstained}
    for rule in (transfer_blocking, sync_point, launch_bound, batch_too_small, precision_unused, compute_bound):
        assert lacking[rule.__name__] == "a training step"


# --------------------------------------------------------------------------- free_switches


def traced(*kernels: tuple[str, float], shapes: int = 1, **switches: Any) -> Run:
    """A job whose step runs these kernels, and 10 ms of kernels in all."""
    seen = tuple(HotLine("", name, seconds) for name, seconds in kernels)
    precision = PrecisionRecord("bfloat16", "float32", False, False, **switches)
    record = KernelRecord(3, 0.010, 0.0, 100, None, seen)
    return on_gpu(kernels=record, precision=precision, loaders=(loader(num_workers=4, batch_shapes=shapes),))


def test_images_that_cudnn_turns_round_are_kept_channels_last() -> None:
    run = traced(("cudnn::ops::nchwToNhwcKernel<__half>", 0.0012), ("nhwcToNchwKernel", 0.0008))
    finding = found(free_switches(gather(run)))
    assert finding.evidence[0].startswith("cuDNN converts images from channels first to last in 20 %")
    assert "memory_format=torch.channels_last" in finding.fix
    assert "not measured" in finding.fix
    assert (finding.severity, finding.predicted_speedup) == ("warn", (1.0, 1.25))
    assert answer(run).verdict.code == "free_switches"


def test_an_optimizer_in_several_kernels_is_fused_where_it_can_be() -> None:
    name = "at::native::multi_tensor_apply_kernel<TensorListMetadata<3>, BinaryOpListAlphaFunctor>"
    finding = found(free_switches(gather(traced((name, 0.001), fused_optimizer=False))))
    assert finding.fix.startswith("One kernel does it: torch.optim.AdamW(fused=True)")
    assert free_switches(gather(traced((name, 0.001), fused_optimizer=None))) is None
    fused = "at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>"
    assert free_switches(gather(traced((fused, 0.001), fused_optimizer=True))) is None


def test_cudnn_searches_once_for_fixed_shapes_and_not_for_changing_ones() -> None:
    name = "sm90_xmma_fprop_implicit_gemm_bf16"
    fixed = found(free_switches(gather(traced((name, 0.006), cudnn_benchmark=False))))
    assert "cudnn.benchmark = True" in fixed.fix
    assert fixed.severity == "info"
    changing = found(free_switches(gather(traced((name, 0.006), shapes=20, cudnn_benchmark=True))))
    assert "cudnn.benchmark = False" in changing.fix
    for shapes, benchmark in ((1, True), (20, False), (4, False)):
        assert free_switches(gather(traced((name, 0.006), shapes=shapes, cudnn_benchmark=benchmark))) is None


def test_without_traced_kernels_no_switch_is_recommended() -> None:
    assert isinstance(free_switches(gather(on_gpu())), Abstention)
