"""The outcome of a trial: its state, figures and note. Pure functions over records and the end of its output."""

from __future__ import annotations

import re
import signal
from typing import Literal

from fulltilt.diagnosis.evidence import Evidence, gather
from fulltilt.diagnosis.libraries import beside_training, loader_call
from fulltilt.figures import SIGNALS
from fulltilt.records import LoaderRecord, Run, Settings, Trial
from fulltilt.tuning.search_space import LOADER_SETTINGS, Attempt, is_loader_only
from fulltilt.tuning.trial.run_trial import Ended
from fulltilt.tuning.trial.throughput import Answer, rate_of, wait_share_of, worse_by

State = Literal["ok", "oom", "crashed", "timed_out", "not_measured", "diverged", "throttled"]

# What running out of memory looks like in a traceback: the GPU's, the host's, and shared memory between workers.
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|Cannot allocate memory|Unable to allocate"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|insufficient shared memory|killed by signal: Killed"
    r"|unable to write to file </torch_"
)
# The last line of a traceback.
_EXCEPTION = re.compile(r"^((?:[A-Za-z_][\w.]*\.)?[A-Z_]\w*(?:Error|Exception|Interrupt|Exit)\b.*)$", re.MULTILINE)
# argparse on unknown flags.
_USAGE = re.compile(r"^(\S+: error: .*)$", re.MULTILINE)
# A write that Landlock or a read-only mount refused, with its path.
_REFUSED = re.compile(r"\[Errno (?:13|30)\] [^']*'([^']+)'")


def trial_record(
    attempt: Attempt,
    ended: Ended,
    answer: Answer,
    run: Run | None,
    start: Trial | None,
    studied: LoaderRecord | None = None,
) -> Trial:
    """The record of a trial. ``run`` is its run folder, ``start`` the trial of the unchanged script.

    ``studied`` is the loader whose settings are tried.
    """
    evidence = gather(run) if run is not None else None
    state, note = _state(attempt, ended, answer, evidence, start)
    rate, ranks = rate_of(answer.blocks), run.ranks[0].world_size if run is not None and run.ranks else 1
    forced = in_force(evidence, attempt.settings, studied)
    if state == "ok" and (lacking := _not_in_force(evidence, attempt.settings.num_workers, studied)):
        state, note = "not_measured", lacking
    samples = [sample.host for sample in run.samples] if run is not None else []
    gpus = evidence.gpus if evidence is not None else ()
    vram = [rank.vram_peak_bytes for rank in run.ranks if rank.vram_peak_bytes is not None] if run is not None else []
    utils = [gpu.util_pct for gpu in gpus if gpu.util_pct is not None]
    return Trial(
        settings=attempt.settings,
        state=state,
        samples_per_s=rate.mean * ranks if rate else None,
        samples_per_s_low=rate.low * ranks if rate else None,
        samples_per_s_high=rate.high * ranks if rate else None,
        vram_peak_bytes=max(vram, default=None),
        ram_peak_bytes=max((host.tree_pss_bytes for host in samples if host.tree_pss_bytes), default=None),
        note=note,
        purpose=attempt.purpose,
        in_force=forced,
        data_wait_share=wait_share_of(answer.blocks),
        vram_total_bytes=next((gpu.vram_total_bytes for gpu in gpus if gpu.vram_total_bytes), None),
        gpu_util_pct=sum(utils) / len(utils) if utils else None,
        cpu_pct=evidence.host.tree_cpu_pct if evidence is not None else None,
        wall_s=ended.wall_s,
        losses=answer.losses,
        others_share=evidence.host.others_share if evidence is not None else None,
        steps=answer.steps or None,
    )


def in_force(evidence: Evidence | None, asked: Settings, studied: LoaderRecord | None = None) -> Settings:
    """The settings that were seen in force; those that cannot be seen are as asked for."""
    if evidence is None or not evidence.run.ranks:
        return asked
    loader, precision = _loader_of(evidence, studied), evidence.rank.precision
    spans = [span for spans in evidence.run.spans for span in spans if span.steps]
    batches, steps = sum(span.batches for span in spans), sum(span.steps for span in spans)
    of_loader = {name: getattr(loader, name, None) for name in (*LOADER_SETTINGS, "batch_size")}
    return Settings(
        **of_loader,
        torch_threads=evidence.rank.torch_threads,
        accumulation=asked.accumulation or (max(1, round(batches / steps)) if steps else None),
        precision=asked.precision or (precision.name if precision else None),
        compile=bool(asked.compile) or (precision.compiled if precision else None),
    )


def _not_in_force(evidence: Evidence | None, workers: int | None, studied: LoaderRecord | None) -> str | None:
    """Why a trial of workers says nothing: a library made its loader without them."""
    loader = _loader_of(evidence, studied) if evidence is not None else None
    if not workers or loader is None or loader.num_workers:
        return None
    call = loader_call(loader.made_by or "", {"num_workers": workers})
    return f"{loader.made_by} does not take workers from outside; write them yourself: {call}" if call else None


def _loader_of(evidence: Evidence, studied: LoaderRecord | None) -> LoaderRecord | None:
    """The studied loader: once it is faster, training may wait longer for another one."""
    if studied is None:
        return evidence.loader
    key = studied.where, studied.dataset_len
    same = (each for each in evidence.rank.loaders if (each.where, each.dataset_len) == key and each.batches)
    return next(same, evidence.loader)


def _state(
    attempt: Attempt, ended: Ended, answer: Answer, evidence: Evidence | None, start: Trial | None
) -> tuple[State, str | None]:
    run = evidence.run if evidence is not None else None
    if ended.stopped_for == "time":
        return "timed_out", f"stopped after {ended.wall_s:.0f} s{_not_reached(run)}"
    if ended.stopped_for == "memory":
        return "oom", "used more memory than a trial may use"
    failed = ended.status != 0 and not answer.complete
    if (failed and _ran_out_of_memory(ended.tail)) or answer.out_of_memory:
        return "oom", last_exception(ended.tail)
    if failed and ended.status == -signal.SIGKILL:
        return "oom", "killed by the system, as when memory runs out"
    if failed:
        refused = _refused_write(ended)
        return "crashed", refused or last_exception(ended.tail) or _how_it_ended(ended.status, ended.tail)
    if not any(block.samples for block in answer.blocks):
        return "not_measured", _nothing_measured(answer.steps, run)
    not_finite = None
    if answer.not_finite_at is not None:
        not_finite = f"the loss of step {answer.not_finite_at + 1} is not a finite number"
        # A faster loader gets further in a trial; with the same training, the start would have diverged there, too.
        is_further = start is not None and answer.not_finite_at >= len(start.losses)
        if not (is_further and is_loader_only(attempt.settings)):
            return "diverged", not_finite
    if start is not None and (worse := worse_by(start.losses, answer.losses)) is not None:
        return "diverged", worse
    # A throttled GPU does not show its normal speed.
    if evidence is not None and (throttled := evidence.invalid_because) is not None:
        return "throttled", throttled
    return "ok", "; ".join((*([not_finite] if not_finite else ()), *answer.remarks)) or None


def _refused_write(ended: Ended) -> str | None:
    """The refused write outside of the scratch folder that ended the trial, if one did."""
    found = _REFUSED.search(last_exception(ended.tail) or "") if ended.isolated else None
    return None if found is None else f"a trial may not write {found[1]}; --in-place allows it ({found[0]})"


def _not_reached(run: Run | None) -> str:
    """What a script that was stopped had not reached yet."""
    spans = [span for spans in run.spans for span in spans] if run is not None else []
    if not any(span.steps for span in spans):
        return ": the script had not reached a training loop (no step of an optimizer was seen)"
    return "" if any(span.batches for span in spans) else ": no DataLoader had given the training a batch"


def _is_a_loader(loader: LoaderRecord) -> bool:
    """Whether a DataLoader gave the batches, not an iterable of the script or of a library."""
    return loader.made_by != "script" and beside_training(loader, 1) is None


def _nothing_measured(steps: int, run: Run | None) -> str:
    if not steps:
        return "the script ended without a step of an optimizer"
    ranks = run.ranks if run is not None else ()
    if ranks and not any(loader.batches and _is_a_loader(loader) for rank in ranks for loader in rank.loaders):
        return f"the script trained {steps} steps without a batch from a DataLoader: there is no loader to tune"
    return f"the script ended after {steps} steps: too few to measure; let it train longer"


def _ran_out_of_memory(tail: str) -> bool:
    """Whether an exception says so, or, without one, any output: a log may mention memory."""
    return any(_OUT_OF_MEMORY.search(text) for text in _EXCEPTION.findall(tail) or [tail])


def last_exception(tail: str) -> str | None:
    """The last exception in a program's output, on one line, shortened; not that of its launcher."""
    found = [line for line in _EXCEPTION.findall(tail) if "ChildFailedError" not in line] or _USAGE.findall(tail)
    return None if not found else found[-1].strip()[:200]


def _how_it_ended(status: int, tail: str) -> str:
    if -status in SIGNALS:
        return f"ended by {SIGNALS[-status]}"
    # Errors of Fulltilt have an indented remedy below them.
    lines = [line for line in tail.split("\n") if line.strip()]
    last = next((line.strip() for line in reversed(lines) if not line[0].isspace()), lines[-1].strip() if lines else "")
    return f"ended with exit code {status}" + (f": {last[:160]}" if last else "")
