"""The script slows the training down: growing steps, its own code, recompilation, validation, checkpoints."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.findings import (
    BUCKET_WORDS,
    OTHERS_TAKE_CPUS,
    Judgement,
    at,
    call_at,
    costliest_line,
    costliest_lines,
    found,
    line_cost,
    neighbours,
    rewritten,
    time_spent,
)
from fulltilt.diagnosis.ledger import Slowdown
from fulltilt.diagnosis.libraries import (
    LIBRARIES,
    SLOW_ENVIRONMENT,
    is_library_code,
    library_of,
    steps_an_environment,
)
from fulltilt.diagnosis.predicted_gain import amdahl, by_removing, gain, rarer, share_left
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import count, percent, seconds, whole
from fulltilt.records import Abstention, Finding, HotLine, LoaderRecord, RankSummary

# --------------------------------------------------------------------------- steps that take longer and longer


def slowing_down(evidence: Evidence) -> Judgement:
    """Steps take longer and longer: by bucket, with the line that grows."""
    slower = evidence.slowdown
    if slower is None:
        return None
    facts = [
        f"a step took {seconds(slower.early_s)} in the first quarter of the run, {seconds(slower.late_s)} in the last",
        f"{BUCKET_WORDS[slower.bucket]} grew by {seconds(slower.grown_s)} a step, more than anything else",
    ]
    facts += (others := neighbours(evidence))
    lines: tuple[HotLine, ...] = ()
    if slower.bucket == "host_code_s":
        lines = evidence.rank.growing_lines
    elif slower.bucket == "data_wait_s":
        lines = evidence.workers.growing_lines if evidence.workers else evidence.rank.growing_lines
    if lines:
        facts.append(f"{line_cost(lines[0])}: how much more it costs than at first")
    elif slower.bucket == "data_wait_s" and (line := costliest_line(evidence)) is not None:
        lines = (line,)
        facts.append(f"of the fetching, {line_cost(line)}")
    where = lines[0].where if lines else None
    share = evidence.share(slower.lost_s)
    cost_s = max(_growing_part(evidence) * _own_code_s(evidence), slower.lost_s)
    if slower.bucket == "compute_s":
        return _growing_compute(evidence, slower, facts, bool(others))
    place = call_at(lines[0]) if lines else BUCKET_WORDS[slower.bucket]
    fix = (
        f"{place} takes longer the longer the job runs: look for something that grows and is read through each time "
        "(a list, a file, a log). Read it once an epoch, keep a running sum, or bound it "
        "(collections.deque(maxlen=...)). If it only began in the middle of the job, do it less often or differently."
    )
    predicted = gain(amdahl(share), max(slower.late_s / slower.early_s, amdahl(evidence.share(cost_s))))
    return found(evidence, "slowing_down", cost_s, facts, fix, where, predicted)


def _growing_compute(evidence: Evidence, slower: Slowdown, facts: list[str], others: bool) -> Finding:
    """Compute that grows. Inputs that grow on purpose (a curriculum, longer texts) look the same."""
    own = [ln for ln in evidence.rank.compute_lines if not (ln.where.startswith("torch/") or is_library_code(ln))]
    costly = max(own, key=lambda line: line.seconds, default=None)
    facts += [f"of compute, {line_cost(costly, evidence.buckets.compute_s)}"] if costly else []
    fix = (
        "Unless the inputs grow on purpose, look for what gets longer with each step: a tensor or list that the script "
        "adds to (torch.cat, append, a memory bank); losses kept with their graph (loss.detach()); state that forward "
        "collects. Keep only the newest part of it (bank[-n:], collections.deque(maxlen=...))."
    )
    fix = f"{OTHERS_TAKE_CPUS} {fix}" if others else fix
    shapes = evidence.loader.batch_shapes if evidence.loader else None
    unsure = others or evidence.invalid_because is not None or (shapes or 0) > THRESHOLDS.few_shapes
    most = max(slower.late_s / slower.early_s, amdahl(evidence.share(slower.lost_s)))
    predicted, where = None if unsure else gain(1.0, most), costly.where if costly else None
    return found(evidence, "slowing_down", slower.lost_s, facts, fix, where, predicted, "info" if unsure else None)


def _growing_part(evidence: Evidence) -> float:
    """The share of lines that take longer and longer in the script's own code: slowing_down reports those."""
    slower, growing = evidence.slowdown, evidence.rank.growing_lines
    if slower is None or slower.bucket != "host_code_s":
        return 0.0
    all_s = sum(line.seconds for line in evidence.host_lines)
    grow_s = sum(line.seconds for line in evidence.host_lines if line.where in _growing(growing))
    return grow_s / all_s if grow_s else min(slower.lost_s / evidence.buckets.host_code_s, 1.0)


def _growing(lines: Sequence[HotLine]) -> set[str]:
    return {line.where for line in lines if line.seconds >= THRESHOLDS.telling_line_share * lines[0].seconds}


def _own_code_s(evidence: Evidence) -> float:
    """Seconds of the script's own code, without launches and garbage collection."""
    return evidence.buckets.host_code_s - (evidence.launch_s or 0.0) - _collecting_s(evidence)


# --------------------------------------------------------------------------- the user's own code

_FOR_OTHERS = "it waits for another thread or process: make that one faster, or wait later"
# What to do about a line, by a pattern in its call or function name.
_ADVICE = (
    (r"\bsleep\(", "remove it, or sleep less"),
    (
        r"\btok(enizer)?\(|\btokenizer\.|tokeni[sz]e",
        "tokenize in the data set or the collate_fn, for workers to do",
    ),
    (r"\.(join|result|wait|acquire)\(\)", _FOR_OTHERS),
    (r"json|dump|write|\bsave|to_csv", "write every {every} steps, or from a second thread"),
    (r"\bprint\(|logg(er|ing)\b|log_metric|add_(scalar|histogram)|wandb", "log every {every} steps"),
    (r"plot|imshow|figure", "draw once an epoch"),
    (r"\b(as_|new_)?tensor\(", "it iterates over lists: give it one NumPy array (np.stack), or keep tensors"),
    (r"deepcopy|\.clone\(", "copy every {every} steps if training allows"),
    (r"\.compute\(\)", "update the metric in each step, but compute it every {every} steps or once an epoch"),
    (r"gc\.collect|empty_cache", "remove it: memory is reused without it"),
    (r"\.numpy\(|\.tolist\(|\.item\(", "keep it in tensors and read it every {every} steps"),
)
# Text in quotes is not what a line does, except inside an f-string.
_QUOTED = re.compile(r"(f?)(\"[^\"]*\"|'[^']*')")
_LESS_OFTEN = (  # it may be needed in every step
    "make it cheaper, or do it less often if training allows (once before the training, every {every} steps, in a "
    "second thread)"
)
_OTHERWISE = f"{_LESS_OFTEN}, or work on whole tensors instead of numbers in Python"
_SELDOM = "it is rare but takes long: make it cheaper, or do it less often or in a second thread if training allows"


def host_code(evidence: Evidence) -> Judgement:
    """The script's own Python in the training loop, while nothing computes. Slow launches are not counted."""
    launch_s, lines = evidence.launch_s, evidence.host_lines
    if evidence.on_gpu and launch_s is None and not lines:
        lacks = "what the host did while the GPU idled (launching kernels, or the script's own code)"
        return Abstention("host_code", lacks)
    grows = _growing_part(evidence)  # reported as slowing_down
    cost_s = (1 - grows) * _own_code_s(evidence)
    share = evidence.share(cost_s)
    if share < THRESHOLDS.host_code_share:
        return None
    if grows:
        lines = tuple(line for line in lines if line.where not in _growing(evidence.rank.growing_lines))
    call = None if grows else _costly_call_of_loop(evidence, cost_s)
    facts = [time_spent(evidence, "the script's own code", cost_s)]
    facts += costliest_lines((call, *lines) if call else lines, cost_s)
    if not lines:
        facts.append("no stack was sampled, so the line is not known")
    fix, where, predicted = f"Find the slow code: {_OTHERWISE.format(every=100)}.", None, by_removing(share)
    spread_out = _is_spread_out(lines, cost_s)
    if spread_out and not call:
        fix = (
            "It is spread over many functions in every step, so no single line is slow. Make fewer and larger steps "
            "(a larger batch), or compile the model (torch.compile)."
        )
    elif lines and not call and is_library_code(lines[0]):
        users = _users_call(evidence)
        fix = (
            f"{lines[0].function} ({lines[0].where}) is library code: change how often it logs, plots or copies "
            f"(log_every_n_steps=, logging_steps= and the like){at(users)}."
        )
        part = lines[0].seconds / max(sum(line.seconds for line in lines), lines[0].seconds)
        where, predicted = users or lines[0].where, by_removing(part * share)
    else:
        # A line of the loop's own function is not inside the call.
        beside = call and lines and lines[0].function == call.function
        slow = call if spread_out or beside else next(iter(lines), None)
        where = slow.where if slow else None
        if slow and evidence.loader is None and (steps_an_environment(slow) or (call and steps_an_environment(call))):
            fix = f"{call_at(call or slow)}: {SLOW_ENVIRONMENT}."
            if others := neighbours(evidence):
                facts, fix = [*facts, *others], f"{fix} {OTHERS_TAKE_CPUS}"
            predicted = gain(1.0, amdahl(share * (1 - 1 / max(evidence.usable_cpus, 1.0))))
        elif slow:
            fix = _speed_up_line(slow, call or slow, share, _is_seldom(evidence))
    return found(evidence, "host_code", cost_s, facts, fix, where, predicted)


def _costly_call_of_loop(evidence: Evidence, cost_s: float) -> HotLine | None:
    """The line of the training loop whose call costs most of the script's own code; None if something else does."""
    call, lines = next(iter(evidence.rank.loop_calls), None), evidence.host_lines
    least_s = max(THRESHOLDS.guilty_function_share * cost_s, *(line.seconds for line in lines[:1]), 0.0)
    return call if call and call.seconds >= least_s else None


def _is_spread_out(lines: Sequence[HotLine], cost_s: float) -> bool:
    """Whether no function has much of the script's own code."""
    by_function: dict[tuple[str, str], float] = defaultdict(float)
    for line in lines:
        by_function[line.where.rpartition(":")[0], line.function] += line.seconds
    return bool(lines) and max(by_function.values()) < THRESHOLDS.guilty_function_share * cost_s


def _is_seldom(evidence: Evidence) -> bool:
    """Whether nearly all host code is in few steps, as between epochs: then doing it every n steps is no advice."""
    spans = [span for own in evidence.run.spans for span in own if span.steps > 0]
    spans.sort(key=lambda span: -span.buckets.host_code_s / span.steps)
    most_s = THRESHOLDS.seldom_code_part * sum(span.buckets.host_code_s for span in spans)
    steps, seen_s = 0, 0.0
    for span in spans:
        if seen_s >= most_s:
            break
        steps, seen_s = steps + span.steps, seen_s + span.buckets.host_code_s
    return steps <= THRESHOLDS.seldom_steps_share * sum(span.steps for span in spans)


def _speed_up_line(line: HotLine, call: HotLine, share: float, seldom: bool) -> str:
    text = _QUOTED.sub(lambda quoted: quoted[0] if quoted[1] else '""', f"{line.call or ''} {line.function}".lower())
    advice = next((advice for pattern, advice in _ADVICE if re.search(pattern, text)), _OTHERWISE)
    if line.waits:
        advice = _FOR_OTHERS
    if seldom and "{every}" in advice:
        advice = _SELDOM
    if advice is _OTHERWISE and re.search(r"\b(torch|np|numpy|linalg)\.", text):
        advice = _LESS_OFTEN  # it already works on whole tensors
    every = next((n for n in (10, 20, 50) if share / n <= 0.01), 100)
    # One line of a function is not to be done more seldom.
    place = call if advice in (_LESS_OFTEN, _OTHERWISE, _SELDOM) else line
    return f"{call_at(place)}: {advice.format(every=every)}."


# --------------------------------------------------------------------------- torch.compile


def recompiling(evidence: Evidence) -> Judgement:
    """torch.compile compiles the same functions again and again: shapes or values change that it took as fixed."""
    record = evidence.rank.compile
    lines = record.recompile_lines if record else ()
    again_s = sum(line.seconds for line in lines)
    since_first_s = evidence.active_s + again_s  # the ledger counts all compiling as start-up
    share = again_s / since_first_s if again_s > 0 else 0.0
    if record is None or share < THRESHOLDS.recompiling_share:
        return None
    facts = [
        f"{count('recompilation', record.recompiles)} took {seconds(again_s)} of the {seconds(since_first_s)} since "
        "the first step",
        *(f"{seconds(line.seconds)} in {line.function}, {line.where}: {line.call}" for line in lines[:3]),
    ]
    fix = (
        f"Tell torch.compile what changes{at(lines[0].where)}: torch.compile(model, dynamic=True), or "
        "torch._dynamo.mark_dynamic(tensor, dim). Or pad batches to fixed shapes, with drop_last=True."
    )
    return found(evidence, "recompiling", share * evidence.active_s, facts, fix, lines[0].where, by_removing(share))


# --------------------------------------------------------------------------- garbage collection


def gc_pauses(evidence: Evidence) -> Judgement:
    """Python's garbage collector walks through all objects again and again, which stops the training."""
    record = evidence.rank.garbage
    # A GPU goes on with queued work: only its idle time is lost.
    cost_s = _collecting_s(evidence) if evidence.on_gpu else record.seconds if record else 0.0
    share = evidence.share(cost_s)
    if record is None or share < THRESHOLDS.gc_share:
        return None
    facts = [
        time_spent(evidence, "garbage collection", cost_s),
        f"{count('collection', record.collections)}, {whole(record.full)} of them full (generation 2), the longest "
        f"{seconds(record.longest_s)}",
    ]
    asked_s = sum(line.seconds for line in record.asked_for)
    where = None
    if asked_s > THRESHOLDS.recovered_low * record.seconds:
        where = record.asked_for[0].where
        facts.append(f"{percent(min(asked_s / record.seconds, 1.0))} of it comes from gc.collect(){at(where)}")
        fix = f"Remove gc.collect(){at(where)}, or collect once an epoch: unreferenced objects are freed without it."
    else:
        fix = (
            "Exclude long-lived objects from collection: gc.collect(); gc.freeze() once, right before the loop. "
            "Fewer Python objects (NumPy arrays instead of lists) make each collection shorter."
        )
    return found(evidence, "gc_pauses", cost_s, facts, fix, where, by_removing(share))


def _collecting_s(evidence: Evidence) -> float:
    """The garbage collection time that is booked as the script's own code."""
    record = evidence.rank.garbage
    return min(record.seconds, evidence.buckets.host_code_s) if record else 0.0


# --------------------------------------------------------------------------- validation


def _only_ends_the_job(evidence: Evidence, bucket: str) -> bool:
    """Whether all of this came after the last step of a finished job: a longer job would have no more of it."""
    during_s = all_s = 0.0
    for own in evidence.run.spans:
        last = max((place for place, span in enumerate(own) if span.steps), default=-1)
        during_s += sum(getattr(span.buckets, bucket) for span in own[: last + 1])
        all_s += sum(getattr(span.buckets, bucket) for span in own)
    return evidence.rank.finished and during_s < THRESHOLDS.stray_part * all_s


def validation_heavy(evidence: Evidence) -> Judgement:
    """Validation takes so much of the job that validating less often would pay."""
    alone = _validates_alone(evidence)
    cost_s = evidence.buckets.validation_s if alone is None else alone.buckets.validation_s
    share = evidence.share(cost_s)
    if share < THRESHOLDS.validation_share:
        return None
    loader = _validation_loader(evidence)
    facts = [time_spent(evidence, "validation", cost_s)]
    if alone is not None:
        mean = percent(evidence.share(evidence.buckets.validation_s))
        facts.append(f"only rank {alone.rank} validates, and the others wait for it: the ledger's {mean} are the mean")
    if loader and loader.passes and loader.role == "eval":
        facts.append(f"{count('pass', loader.passes)} over {loader.dataset}, {seconds(cost_s / loader.passes)} each")
    own_code = next(iter(evidence.rank.validation_lines), None)
    if own_code and own_code.seconds < THRESHOLDS.guilty_function_share * cost_s:
        own_code = None
    facts += [f"of it, {line_cost(own_code, cost_s)}"] if own_code else []
    every = rarer(share, THRESHOLDS.validation_target_share)
    left = share_left(share, every)
    high = amdahl(share * (1 - 1 / every))
    predicted = gain(1 + (high - 1) * THRESHOLDS.recovered_low, high)
    if _only_ends_the_job(evidence, "validation_s"):
        fix = "It ran only after the last step, so it cannot run less often."
        predicted = gain(1.0, amdahl(share * THRESHOLDS.recovered_low))
    else:
        line = f" ({evidence.rank.validates_at})" if evidence.rank.validates_at else ""
        what = "Validate" if loader else "Validate, or draw samples from the model,"
        fix = f"{what} every {_ordinal(every)} time{line}: its share falls from {percent(share)} to {percent(left)}."
        if (library := LIBRARIES.get(loader.made_by or "") if loader else None) and library.validate:
            fix += f" {library.validate}."
    if alone is not None:
        fix += " Divide it among the ranks: give its loader a DistributedSampler, and sum up the results."
    asked = evidence.run.run.asked
    in_memory = asked.residency is not None and (asked.residency != "none" or asked.num_workers)  # a recipe's settings
    waited_s = loader.wait_s + loader.first_wait_s + loader.restart_s if loader else 0.0
    waits = waited_s >= THRESHOLDS.waiting_validation_share * cost_s  # workers help with that only
    if loader and loader.num_workers == 0 and not in_memory and (loader.role == "train" or waits):
        call = rewritten(evidence, loader, num_workers=2, persistent_workers=True)
        fix += f" Its loader{at(loader.where)} has no workers: {call}."
    if own_code:
        fix += f" Or make {call_at(own_code)} cheaper."
    elif loader is None:
        fix += " If it generates training data (rollouts, text), run several at once."
    else:
        fix += " Where its compute limits, a larger validation batch is faster and changes no result."
    # After a long start-up a few seconds are a large share, but still little of the job: then it is only a remark.
    small = cost_s < THRESHOLDS.small_validation_share * evidence.ledger.wall_s
    where = loader.where if loader else None
    return found(evidence, "validation_heavy", cost_s, facts, fix, where, predicted, "info" if small else None)


def _validates_alone(evidence: Evidence) -> RankSummary | None:
    """The only rank that validates, if there are others: the job then lasts as long as that one takes."""
    *others, most = sorted(evidence.ranks, key=lambda rank: rank.buckets.validation_s)
    others_s = max((rank.buckets.validation_s for rank in others), default=most.buckets.validation_s)
    return most if others_s < THRESHOLDS.stray_part * most.buckets.validation_s else None


def _validation_loader(evidence: Evidence) -> LoaderRecord | None:
    """The loader that validation uses most; it may also be used for training."""
    loaders = evidence.rank.loaders
    own = max((loader for loader in loaders if loader.role == "eval"), key=lambda one: one.batches, default=None)
    also_evaluate = (loader for loader in loaders if loader.role == "train" and loader.eval_batches)
    return own or max(also_evaluate, key=lambda loader: loader.eval_batches, default=None)


# --------------------------------------------------------------------------- checkpoints


def checkpoint_stall(evidence: Evidence) -> Judgement:
    """Training stops while the model is saved. A single save at the end does not count."""
    cost_s = evidence.buckets.checkpoint_s
    share = evidence.share(cost_s)
    if share < THRESHOLDS.checkpoint_share or _only_ends_the_job(evidence, "checkpoint_s"):
        return None
    lines = sorted(evidence.rank.checkpoint_lines, key=lambda line: -line.seconds)
    facts = [time_spent(evidence, "saving", cost_s), *costliest_lines(lines, cost_s)]
    every = rarer(share, THRESHOLDS.checkpoint_target_share)
    left = share_left(share, every)
    where = lines[0].where if lines else None
    falls = f"its share falls from {percent(share)} to {percent(left)}"
    # Less frequent saves leave a part of the time, asynchronous ones the copying: either may win more.
    rarely, beside = amdahl(share * (1 - 1 / every)), amdahl(share * (1 - THRESHOLDS.async_checkpoint_part))
    if any(loader.made_by == "fulltilt" for loader in evidence.rank.loaders):
        fix = (
            f"Leave out save_every in the settings, or make it {every} times as large ({falls}); or use a faster disk."
        )
        beside = 1 + (rarely - 1) * THRESHOLDS.recovered_low
    elif library := library_of(lines[0] if lines else None):
        where = _users_call(evidence) or where
        fix = f"Save every {_ordinal(every)} time: {falls}. {library.save or 'Its settings say how often it saves'}."
    else:
        fix = (
            f"Save every {_ordinal(every)} time{at(where)}: {falls}. "
            "Or save in the background (torch.distributed.checkpoint.async_save)."
        )
    predicted = gain(min(rarely, beside), max(rarely, beside))
    return found(evidence, "checkpoint_stall", cost_s, facts, fix, where, predicted)


def _users_call(evidence: Evidence) -> str | None:
    """The user's line that calls the training library, where a loader of that library shows it."""
    loaders = evidence.rank.loaders
    return next((loader.where for loader in loaders if loader.made_by in LIBRARIES and loader.where), None)


def _ordinal(k: int) -> str:
    ending = "th" if 10 <= k % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(k % 10, "th")
    return f"{k}{ending}"
