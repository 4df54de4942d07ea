from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fulltilt.diagnosis import answer
from fulltilt.diagnosis.evidence import Evidence, gather
from fulltilt.diagnosis.predicted_gain import rarer, share_left
from fulltilt.diagnosis.rules.training_loop import (
    checkpoint_stall,
    gc_pauses,
    host_code,
    recompiling,
    slowing_down,
    validation_heavy,
)
from fulltilt.records import (
    Abstention,
    Buckets,
    CompileRecord,
    Finding,
    GarbageRecord,
    HotLine,
    LiveMove,
    LiveRecord,
    RankRecord,
    Sample,
    Settings,
    Span,
)
from tests.diagnosis.examples import (
    BATCH,
    gpu,
    gpu_rank,
    host,
    loader,
    machine,
    rank,
    run_of,
    sampled,
    spans_of,
    workers,
)


def found(judgement: object) -> Finding:
    assert isinstance(judgement, Finding)
    return judgement


# --------------------------------------------------------------------------- host_code


def test_a_sleep_after_each_step_is_named() -> None:
    lines = (HotLine("train.py:60", "main", 1.0), HotLine("train.py:55", "main", 49.0, "time.sleep(0.05)"))
    finding = found(host_code(gather(run_of(rank(host_lines=lines), host_code=50.0, compute=50.0))))
    assert finding.share == pytest.approx(50 / 100)
    assert (finding.where, finding.severity) == ("train.py:55", "severe")
    assert finding.evidence == (
        "the script's own code takes 50 % of the time after start-up: 50 s, 50 ms a step",
        "49 s in main, train.py:55 (time.sleep(0.05))",
        "1 s in main, train.py:60",
    )
    assert finding.fix == "time.sleep(0.05) at train.py:55: remove it, or sleep less."
    assert finding.predicted_speedup == (1.33, 2.0)


def test_no_line_costs_more_than_all_and_one_met_by_chance_is_no_evidence() -> None:
    """Of 1.48 s of host code, 1.52 s were said to be one line's, and 5 ms another's."""
    lines = (HotLine("train.py:10", "main", 1.52), HotLine("<internal>:7", "cleanup", 0.005))
    finding = found(host_code(gather(run_of(rank(host_lines=lines), host_code=1.48, compute=2.0))))
    assert finding.evidence[1:] == ("1.48 s in main, train.py:10",)


def test_a_vector_of_environments_should_step_in_processes() -> None:
    """The line lay in a comprehension of its step: the advice was to step them every 100 steps, for 2.3 ×."""
    call = HotLine("ppo.py:26", "main", 50.0, "envs.step(actions)")
    for function in ("Maze.step.<locals>.<listcomp>", "Maze.look"):
        acting = rank(loaders=(), loop_calls=(call,), host_lines=(HotLine("ppo.py:12", function, 48.0, "int(a)"),))
        finding = found(host_code(gather(run_of(acting, on=machine(2.0), host_code=50.0, compute=50.0))))
        assert finding.fix.startswith("envs.step(actions) at ppo.py:26: the environment is slow: step several at once")
        assert finding.predicted_speedup == (1.0, 1.33)
        busy = sampled(host_reading=host(cpu_pct=99.0, tree_cpu_pct=20.0))
        crowded = found(host_code(gather(run_of(acting, on=machine(2.0), samples=busy, host_code=50.0, compute=50.0))))
        assert "Other processes on the machine take the CPUs" in crowded.fix


def test_logging_of_weights_should_be_rarer() -> None:
    lines = (HotLine("log.py:9", "dump_weights", 30.0, "json.dump(weights, file)"),)
    finding = found(host_code(gather(run_of(rank(host_lines=lines), host_code=30.0, compute=70.0))))
    assert "write every 50 steps" in finding.fix


@pytest.mark.parametrize(
    ("call", "part"),
    [
        ("np.savez(path, **{k: v.numpy() for k, v in state.items()})", "write every 50 steps"),
        ("logger.info(loss)", "log every 50 steps"),
        ("bank.push(k)", "if training allows"),
        ("logits = head(x)", "make it cheaper, or do it less often if training allows"),
        ("copy.deepcopy(model)", "copy every 50 steps"),
        ("auroc.compute()", "compute it every 50 steps or once an epoch"),
        ("torch.tensor(rows)", "give it one NumPy array"),
        ("torch.cuda.empty_cache()", "remove it"),
    ],
)
def test_each_kind_of_line_has_its_own_cure(call: str, part: str) -> None:
    lines = (HotLine("train.py:9", "main", 30.0, call),)
    assert part in found(host_code(gather(run_of(rank(host_lines=lines), host_code=30.0, compute=70.0)))).fix


def test_what_a_line_says_is_not_what_it_does() -> None:
    """`subprocess.run([python, "-c", "time.sleep(1)"])` was said to wait on purpose."""
    for call, told in (
        ('call("sleep(1)")', "make it cheaper, or do it less often if training allows"),
        ('call(f"{sleep(1)}")', "or sleep less"),
        ("call('a', 'print(b)', sleep(1))", "or sleep less"),
    ):
        lines = (HotLine("train.py:9", "main", 30.0, call),)
        assert told in found(host_code(gather(run_of(rank(host_lines=lines), host_code=30.0, compute=70.0)))).fix


def test_a_line_that_waits_is_not_told_to_use_a_second_thread() -> None:
    lines = (HotLine("train.py:9", "main", 30.0, "subprocess.run(check)", waits=True),)
    fix = found(host_code(gather(run_of(rank(host_lines=lines), host_code=30.0, compute=70.0)))).fix
    assert fix.startswith("subprocess.run(check) at train.py:9: it waits for another thread or process:")


def test_code_between_epochs_is_not_to_be_done_every_so_many_steps() -> None:
    """It came every 400 steps, and the advice was every 50."""
    made = rank(host_lines=(HotLine("train.py:12", "main", 30.0, "pool.map(feature, files)"),))
    between = Span(10.0, 41.0, 0, 1, 1, BATCH, Buckets(host_code_s=30.0, compute_s=1.0))
    within = Span(41.0, 110.0, 1, 999, 999, 999 * BATCH, Buckets(host_code_s=1.0, compute_s=68.0))
    for spans, seldom in (((between, within), True), (spans_of(host_code=31.0, compute=69.0), False)):
        fix = found(host_code(gather(run_of(made, spans=(spans,))))).fix
        assert ("it is rare" in fix, " steps, in a" in fix) == (seldom, not seldom)


def test_overhead_spread_over_a_library_blames_no_line() -> None:
    lines = tuple(HotLine(f"transformers/part_{i}.py:9", f"step_{i}", 2.0, "self.call()") for i in range(12))
    finding = found(host_code(gather(run_of(rank(host_lines=lines), host_code=30.0, compute=70.0))))
    assert finding.where is None
    assert "no single line is slow" in finding.fix


def test_a_librarys_call_in_the_loop_of_another_is_changed_by_settings() -> None:
    """The commit of a logger's database was to be moved out of the step, for all that the trainer's loop took."""
    inside = "mlflow/client.py:MlflowClient.log_batch sqlalchemy/engine/default.py:do_commit"
    logs = HotLine("mlflow/client.py:9", "MlflowClient.log_batch", 20.0, "self.store.log(x)", inside=inside)
    lines = (logs, HotLine("lightning/loop.py:9", "advance", 10.0, "self.run()"))
    finding = found(host_code(gather(run_of(rank(host_lines=lines), host_code=30.0, compute=70.0))))
    assert finding.fix.startswith("MlflowClient.log_batch (mlflow/client.py:9) is library code: change how often")
    assert finding.predicted_speedup is not None
    assert finding.predicted_speedup[1] == pytest.approx(1 / 0.8)


def test_lines_of_one_function_are_blamed_together() -> None:
    lines = tuple(HotLine(f"metric.py:{i}", "score", 3.0 + i, "hits += a == b") for i in range(5))
    finding = found(host_code(gather(run_of(rank(host_lines=lines), host_code=30.0, compute=70.0))))
    assert finding.where == "metric.py:4"


@pytest.mark.parametrize(
    ("functions", "where"), [(["merge"] * 5, "bpe.py:0"), ([f"f{i}" for i in range(5)], "train.py:9")]
)
def test_a_function_whose_lines_all_cost_is_named_by_its_call_in_the_loop(functions: list[str], where: str) -> None:
    """`pieces.append(best)` was to be done every 20 steps."""
    lines = tuple(HotLine(f"bpe.py:{i}", name, 6.0, "pieces.append(best)") for i, name in enumerate(functions))
    calls = (HotLine("train.py:9", "main", 30.0, "merge_all(texts)"),)
    finding = found(host_code(gather(run_of(rank(host_lines=lines, loop_calls=calls), host_code=30.0, compute=70.0))))
    assert finding.where == where
    assert finding.evidence[1] == "30 s in main, train.py:9 (merge_all(texts))"
    assert finding.fix.startswith(
        "merge_all(texts) at train.py:9: make it cheaper, or do it less often if training allows (once before"
    )


@pytest.mark.parametrize(("own_s", "named"), [(20.0, "np.sort(x) at train.py:7"), (5.0, "log(x) at train.py:9")])
def test_a_line_of_the_loop_itself_is_not_taken_for_the_call_beside_it(own_s: float, named: str) -> None:
    inside = tuple(HotLine(f"log.py:{i}", "log", 4.0, "rows.append(x)") for i in range(3))
    lines = (HotLine("train.py:7", "main", own_s, "np.sort(x)"), *inside)
    calls = (HotLine("train.py:9", "main", 12.0, "log(x)"),)
    finding = found(host_code(gather(run_of(rank(host_lines=lines, loop_calls=calls), host_code=30.0, compute=70.0))))
    assert finding.fix.startswith(named)
    assert named.endswith(f" at {finding.where}")


def test_slow_launches_are_not_the_scripts_own_code() -> None:
    lines = (HotLine("train.py:55", "main", 20.0),)
    launching = gather(run_of(gpu_rank(launch_s=17.0, host_lines=lines), host_code=20.0, compute=80.0))
    assert host_code(launching) is None
    writing = gather(run_of(gpu_rank(launch_s=8.0, host_lines=lines), host_code=20.0, compute=80.0))
    assert found(host_code(writing)).share == pytest.approx(12 / 100)


def test_host_code_without_a_sampled_line_is_still_found() -> None:
    finding = found(host_code(gather(run_of(rank(), host_code=30.0, compute=70.0))))
    assert finding.where is None
    assert "no stack was sampled, so the line is not known" in finding.evidence


def test_quick_host_code_is_left_alone_and_unknown_idling_not_judged() -> None:
    assert host_code(gather(run_of(rank(), host_code=4.0, compute=96.0))) is None
    judgement = host_code(gather(run_of(gpu_rank(launch_s=None), host_code=30.0, compute=70.0)))
    assert judgement == Abstention(
        "host_code", "what the host did while the GPU idled (launching kernels, or the script's own code)"
    )


# --------------------------------------------------------------------------- slowing_down


def steps_of(length_s: Callable[[int], Buckets], number: int = 200, samples: int | None = BATCH) -> tuple[Span, ...]:
    """Start-up, and one span a step."""
    spans = [Span(0.0, 10.0, 0, 0, 0, None, Buckets(startup_s=10.0))]
    for step in range(number):
        buckets, t0_s = length_s(step), spans[-1].t1_s
        spans.append(Span(t0_s, t0_s + buckets.total_s, step, 1, 1, samples, buckets))
    return tuple(spans)


def test_a_list_that_grows_is_named_by_its_line_before_the_rest_of_the_code() -> None:
    lines = (HotLine("train.py:70", "log", 15.0, "sorted(history)"),)
    spans = steps_of(lambda step: Buckets(compute_s=0.05, host_code_s=0.01 + 0.001 * step))
    run = run_of(rank(host_lines=lines, growing_lines=lines), spans=(spans,))
    finding = found(slowing_down(gather(run)))
    assert finding.where == "train.py:70"
    assert finding.evidence[0] == "a step took 85.5 ms in the first quarter of the run, 234 ms in the last"
    assert finding.evidence[1].startswith("the script's own code grew by 149 ms a step")
    assert finding.fix.startswith("sorted(history) at train.py:70 takes longer the longer the job runs")
    assert "once an epoch" in finding.fix
    assert finding.predicted_speedup == (1.9, 3.19)
    assert [one.code for one in answer(run).findings][:1] == ["slowing_down"]
    assert "host_code" not in {one.code for one in answer(run).findings}  # the same line, told once


def test_a_function_that_grows_is_told_once_though_a_call_leads_to_it() -> None:
    line = HotLine("train.py:16", "smooth", 21.0, "for value in h")
    call, sleep = replace(line, where="train.py:60", function="main"), HotLine("train.py:61", "main", 5.0, "sleep(1)")
    spans = steps_of(lambda step: Buckets(compute_s=0.05, host_code_s=0.01 + 0.001 * step))
    grows = rank(host_lines=(line,), growing_lines=(line,), loop_calls=(call,))
    alone = answer(run_of(grows, spans=(spans,))).findings
    assert [(one.code, one.where) for one in alone][:1] == [("slowing_down", "train.py:16")]
    assert alone[0].share_after_startup == pytest.approx(21.9 / 31.9, abs=0.01)
    assert "host_code" not in {one.code for one in alone}
    sleeps = replace(grows, host_lines=(line, sleep))
    both = {one.code: one for one in answer(run_of(sleeps, spans=(spans,))).findings}
    assert both["host_code"].where == "train.py:61"
    assert both["host_code"].share == pytest.approx(both["slowing_down"].share * 5 / 21)


def test_a_fetch_that_grows_in_the_training_thread_is_named_by_its_line() -> None:
    line = HotLine("data.py:9", "Log.__getitem__", 19.0, "sum(self.seen)")
    work = workers(fetch_s=20.0, processes=0, lines=(line,))
    spans = steps_of(lambda step: Buckets(compute_s=0.05, data_wait_s=0.01 + 0.001 * step))
    finding = found(slowing_down(gather(run_of(rank(loaders=(loader(),), workers=(work,)), spans=(spans,)))))
    assert finding.where == "data.py:9"
    assert finding.fix.startswith("sum(self.seen) at data.py:9 takes longer the longer the job runs")


def test_calls_of_torch_are_not_said_to_work_on_numbers() -> None:
    for call, numbers in (("torch.linalg.svdvals(v)", False), ("np.quantile(w, q)", False), ("total(rows)", True)):
        line = HotLine("train.py:17", "after", 60.0, call)
        fix = found(host_code(gather(run_of(rank(host_lines=(line,)), host_code=60.0, compute=40.0)))).fix
        assert fix.startswith(f"{call} at train.py:17: make it cheaper, or do it less often if training allows")
        assert ("numbers in Python" in fix) == numbers


def test_a_line_that_makes_batches_is_no_code_of_the_loop() -> None:
    """A pipe that a generator reads was told twice, and the log beside it not at all."""
    reads = HotLine("train.py:14", "frames", 48.0, "pipe.read(size)")
    logs = HotLine("train.py:37", "<module>", 18.0, "json.dumps(row)")
    made = rank(loaders=(), host_lines=(reads, logs), drawing_lines=(reads,))
    findings = answer(run_of(made, data_wait=50.0, host_code=20.0, compute=30.0)).findings
    where = {one.code: one.where for one in findings}
    assert (where["input_serial"], where["host_code"]) == ("train.py:14", "train.py:37")


def test_steps_that_added_workers_slow_down_are_not_called_slower() -> None:
    """Live tuning went from one worker to three, which took CPUs from compute and the script's own code."""
    moves = [LiveMove(Settings(num_workers=n), began_s, "kept") for n, began_s in ((2, 13.0), (3, 16.0))]
    live = LiveRecord(1, "settled", "", Settings(), Settings(num_workers=3), moves=tuple(moves))
    for name in ("compute_s", "host_code_s"):
        for records, told in (((), True), ((live,), False)):
            spans = steps_of(lambda step, n=name: Buckets(**{n: 0.03 + 0.00015 * min(step, 170)}))
            judgement = slowing_down(gather(run_of(rank(loaders=(loader(),), live=records), spans=(spans,))))
            assert (judgement is not None) == told


def test_steps_that_vary_or_change_once_do_not_slow_down() -> None:
    noisy = steps_of(lambda step: Buckets(compute_s=0.05 + 0.03 * (step % 3)))
    late_neighbour = steps_of(lambda step: Buckets(compute_s=0.05 if step < 120 else 0.09 - 0.0001 * (step - 120)))
    faster = steps_of(lambda step: Buckets(data_wait_s=0.2 / (step + 1), compute_s=0.05))
    for spans in (noisy, late_neighbour, faster):
        assert slowing_down(gather(run_of(rank(), spans=(spans,)))) is None


def test_a_short_run_or_a_growing_batch_is_not_called_slow() -> None:
    short = steps_of(lambda step: Buckets(compute_s=0.001 * step), number=60)
    assert slowing_down(gather(run_of(rank(), spans=(short,)))) is None
    larger = [replace(one, samples=BATCH + n) for n, one in enumerate(short_steps(lambda n: 0.002 * (BATCH + n)))]
    assert slowing_down(gather(run_of(rank(), spans=(tuple(larger),)))) is None


def short_steps(length_s: Callable[[int], float]) -> tuple[Span, ...]:
    return steps_of(lambda step: Buckets(compute_s=length_s(step)))[1:]


GROWING_COMPUTE = steps_of(lambda step: Buckets(compute_s=0.05 + 0.001 * step))


def test_compute_that_grows_comes_before_compute_bound_with_its_line() -> None:
    """A memory bank that was never cut got "Compute-bound: only less arithmetic"."""
    product = HotLine("train.py:20", "loss_of", 14.0, "q @ bank.keys.T")
    made = rank(compute_lines=(product,), loaders=(loader(batch_shapes=2),))
    verdict, (first, second) = (both := answer(run_of(made, spans=(GROWING_COMPUTE,)))).verdict, both.findings[:2]
    assert (verdict.code, second.code) == ("slowing_down", "compute_bound")
    assert (first.severity, first.where, first.predicted_speedup) == ("severe", "train.py:20", (1.0, 2.97))
    assert "of compute, 47 % in loss_of, train.py:20 (q @ bank.keys.T)" in first.evidence
    assert "Find out why compute takes longer and longer. Apart from that, only less arithmetic" in second.fix


def test_compute_that_grows_stays_a_remark_where_inputs_or_machine_may_explain_it() -> None:
    resized = run_of(rank(loaders=(loader(batch_shapes=3),)), spans=(GROWING_COMPUTE,))
    throttled = tuple(Sample(10.0 + n, host(), (gpu(throttle_reasons=("hw_slowdown",)),)) for n in range(25))
    for run in (resized, run_of(gpu_rank(), spans=(GROWING_COMPUTE,), samples=throttled)):
        finding = found(slowing_down(gather(run)))
        assert (finding.severity, finding.predicted_speedup, finding.where) == ("info", None, None)
        assert answer(run).verdict.code != "slowing_down"


# --------------------------------------------------------------------------- gc_pauses


def test_a_collection_asked_for_each_step_is_named_and_is_no_other_host_code() -> None:
    lines = (HotLine("train.py:60", "main", 29.0, "gc.collect()"),)
    garbage = GarbageRecord(1200, full=1000, seconds=30.0, longest_s=0.05, asked_for=lines)
    run = run_of(rank(garbage=garbage, host_lines=lines), host_code=31.0, compute=69.0)
    finding = found(gc_pauses(gather(run)))
    assert (finding.share, finding.severity, finding.where) == (pytest.approx(0.3), "severe", "train.py:60")
    assert "1,200 collections, 1,000 of them full" in finding.evidence[1]
    assert "Remove gc.collect() at train.py:60" in finding.fix
    assert host_code(gather(run)) is None
    assert answer(run).verdict.code == "gc_pauses"


def test_collections_that_come_by_themselves_are_frozen_away() -> None:
    garbage = GarbageRecord(400, full=3, seconds=12.0, longest_s=4.0)
    finding = found(gc_pauses(gather(run_of(rank(garbage=garbage), host_code=12.0, compute=88.0))))
    assert finding.where is None
    assert "gc.freeze()" in finding.fix


def test_collections_as_every_loop_has_them_are_no_finding() -> None:
    garbage = GarbageRecord(400, full=1, seconds=1.0, longest_s=0.2)
    assert gc_pauses(gather(run_of(rank(garbage=garbage), compute=100.0))) is None
    assert gc_pauses(gather(run_of(rank(), compute=100.0))) is None


# --------------------------------------------------------------------------- recompiling


def test_recompilations_that_cost_much_are_told_with_their_reason() -> None:
    lines = (
        HotLine("net.py:12", "forward", 8.0, "7 times: size mismatch"),
        HotLine("net.py:30", "loss", 2.0),
    )
    compiled = CompileRecord(compiles=12, seconds=30.0, recompiles=9, recompile_lines=lines)
    run = run_of(rank(compile=compiled), compute=90.0)
    finding = found(recompiling(gather(run)))
    assert (finding.share, finding.severity, finding.where) == (pytest.approx(0.1), "warn", "net.py:12")
    assert finding.evidence[:2] == (
        "9 recompilations took 10 s of the 1 min 40 s since the first step",
        "8 s in forward, net.py:12: 7 times: size mismatch",
    )
    assert "torch.compile(model, dynamic=True)" in finding.fix
    assert "mark_dynamic" in finding.fix
    assert answer(run).verdict.sentence.startswith("Recompilation: 9 recompilations took 10 s")


def test_few_recompilations_or_none_are_left_alone() -> None:
    lines = (HotLine("net.py:12", "forward", 2.0, "1 times: size mismatch"),)
    compiled = CompileRecord(compiles=2, seconds=30.0, recompiles=1, recompile_lines=lines)
    assert recompiling(gather(run_of(rank(compile=compiled), compute=90.0))) is None
    assert recompiling(gather(run_of(rank(), compute=90.0))) is None


# --------------------------------------------------------------------------- validation_heavy


def test_the_line_that_takes_most_of_a_validation_is_named() -> None:
    """A bootstrap of scikit-learn's metrics was to be faster with larger batches."""
    checking = loader(loader_id=2, role="eval", passes=5)
    scores = HotLine("train.py:16", "interval", 40.0, "roc_auc_score(t, p)")
    made = rank(loaders=(loader(), checking), validation_lines=(scores,))
    finding = found(validation_heavy(gather(run_of(made, validation=50.0, compute=50.0))))
    assert "of it, 80 % in interval, train.py:16 (roc_auc_score(t, p))" in finding.evidence
    assert finding.fix.endswith(" Or make roc_auc_score(t, p) at train.py:16 cheaper.")
    small = replace(made, validation_lines=(replace(scores, seconds=10.0),))
    assert "roc_auc_score" not in found(validation_heavy(gather(run_of(small, validation=50.0, compute=50.0)))).fix


def test_validation_every_few_steps_says_how_much_rarer() -> None:
    checking = loader(loader_id=2, role="eval", where="train.py:70", dataset="Held out", passes=50, batches=500)
    checking = replace(checking, wait_s=30.0)
    run = run_of(rank(loaders=(loader(), checking)), validation=50.0, compute=50.0)
    finding = found(validation_heavy(gather(run)))
    assert finding.where == "train.py:70"
    assert "50 passes over Held out, 1 s each" in finding.evidence
    assert finding.fix.startswith("Validate every 9th time: its share falls from 50 % to 10 %.")
    assert "Its loader at train.py:70 has no workers" in finding.fix
    assert "inference_mode" not in finding.fix  # whether the script has it already is not known
    # Of 100 s, 50 of validation become 5.6: 1.8 ×.
    assert finding.predicted_speedup == (1.4, 1.8)
    ranks = rank(loaders=(loader(), replace(checking, wait_s=3.0)), validates_at="train.py:66")
    computing = found(validation_heavy(gather(run_of(ranks, validation=50.0, compute=50.0))))
    assert computing.fix.startswith("Validate every 9th time (train.py:66): its share")
    assert "no workers" not in computing.fix


def test_what_only_ends_a_job_is_not_to_come_more_rarely() -> None:
    *training, last = spans_of(compute=60.0)
    ending = replace(last, t0_s=last.t1_s, t1_s=last.t1_s + 40.0, steps=0, samples=0)
    checking = loader(loader_id=2, role="eval", where="train.py:70", passes=1, batches=500, wait_s=20.0)
    ranks = rank(loaders=(loader(), checking))

    def ended_with(one: RankRecord = ranks, **seconds: float) -> Evidence:
        return gather(run_of(one, spans=((*training, last, replace(ending, buckets=Buckets(**seconds))),)))

    finding = found(validation_heavy(ended_with(validation_s=40.0)))
    assert "only after the last step" in finding.fix
    assert "Its loader at train.py:70 has no workers" in finding.fix
    assert checkpoint_stall(ended_with(checkpoint_s=40.0)) is None
    assert checkpoint_stall(ended_with(replace(ranks, finished=False), checkpoint_s=40.0)) is not None


def test_a_validation_that_is_little_of_the_job_hides_no_cause() -> None:
    """Behind a start-up of minutes, 4 % of the wall time came before the rest as a quarter of the training."""
    for startup_s, severity, first in ((500.0, "info", "compute_bound"), (10.0, "warn", "validation_heavy")):
        training = spans_of(validation=25.0, compute=75.0)[1]
        training = replace(training, t0_s=startup_s, t1_s=startup_s + 100.0)
        began = Span(0.0, startup_s, 0, 0, 0, None, Buckets(startup_s=startup_s))
        run = run_of(rank(), spans=((began, training),))
        assert found(validation_heavy(gather(run))).severity == severity
        assert answer(run).verdict.code == first


def test_a_recipes_validation_is_changed_in_its_settings() -> None:
    checking = loader(loader_id=2, role="eval", where=None, made_by="fulltilt", num_workers=2)
    finding = found(validation_heavy(gather(run_of(rank(loaders=(loader(), checking)), validation=50.0, compute=50.0))))
    assert finding.where is None
    assert "eval_every in the settings" in finding.fix


def test_what_lies_in_memory_is_not_advised_workers() -> None:
    checking = loader(loader_id=2, role="eval", where=None, made_by="fulltilt", wait_s=20.0)
    ranks = rank(loaders=(loader(), checking))

    def advice(**asked: Any) -> str:
        run = run_of(ranks, run={"asked": Settings(**asked)}, validation=50.0, compute=50.0)
        return found(validation_heavy(gather(run))).fix

    assert "workers" not in advice(num_workers=2, residency="auto")
    assert "workers" not in advice(num_workers=0, residency="auto")
    assert "workers=2 in the training's settings" in advice(num_workers=0, residency="none")


def test_an_ordinary_validation_is_left_alone() -> None:
    assert validation_heavy(gather(run_of(rank(), validation=19.0, compute=81.0))) is None


def test_validation_on_the_training_loader_names_it() -> None:
    shared = loader(num_workers=0, passes=10, batches=500, eval_batches=400)
    finding = found(validation_heavy(gather(run_of(rank(loaders=(shared,)), validation=40.0, compute=60.0))))
    assert finding.where == shared.where
    assert finding.evidence == ("validation takes 40 % of the time after start-up: 40 s, 40 ms a step",)
    assert f"Its loader at {shared.where} has no workers" in finding.fix
    apart = loader(loader_id=1, role="eval", where="train.py:99", batches=3)
    run = run_of(rank(loaders=(shared, apart)), validation=40.0, compute=60.0)
    assert found(validation_heavy(gather(run))).where == "train.py:99"
    only_trains = run_of(rank(loaders=(loader(),)), validation=40.0, compute=60.0)
    assert found(validation_heavy(gather(only_trains))).where is None


# --------------------------------------------------------------------------- checkpoint_stall


def test_saving_says_how_much_rarer_or_beside_the_training() -> None:
    lines = (HotLine("train.py:80", "save", 29.0, "torch.save(state, path)"),)
    finding = found(checkpoint_stall(gather(run_of(rank(checkpoint_lines=lines), checkpoint=30.0, compute=70.0))))
    assert (finding.where, finding.severity) == ("train.py:80", "severe")
    assert finding.fix.startswith("Save every 21st time at train.py:80: its share falls from 30 % to 2.0 %.")
    assert "async_save" in finding.fix
    assert finding.predicted_speedup == (1.32, 1.4)


def test_rare_saves_are_left_alone() -> None:
    assert checkpoint_stall(gather(run_of(rank(), checkpoint=4.0, compute=96.0))) is None


def test_a_trainer_of_ours_is_not_told_to_do_what_it_does() -> None:
    ours = rank(loaders=(loader(made_by="fulltilt"),))
    finding = found(checkpoint_stall(gather(run_of(ours, checkpoint=30.0, compute=70.0))))
    assert finding.fix == (
        "Leave out save_every in the settings, or make it 21 times as large (its share falls from 30 % to 2.0 %); or "
        "use a faster disk."
    )
    theirs = found(checkpoint_stall(gather(run_of(rank(), checkpoint=30.0, compute=70.0))))
    assert finding.predicted_speedup is not None
    assert theirs.predicted_speedup is not None
    assert finding.predicted_speedup[0] < theirs.predicted_speedup[0]


def test_doing_it_rarer_brings_its_share_to_the_target() -> None:
    for share in (0.06, 0.3, 0.7, 0.97):
        every = rarer(share, 0.02)
        assert share_left(share, every) <= 0.02 + 1e-9
        assert every == 2 or share_left(share, every - 1) > 0.02


def test_host_rules_abstain_without_steps() -> None:
    lacking = {a.code: a.lacks for a in answer(run_of(rank(), spans=((spans_of()[0],),))).abstained}
    for rule in (host_code, validation_heavy, checkpoint_stall):
        assert lacking[rule.__name__] == "a training step"
