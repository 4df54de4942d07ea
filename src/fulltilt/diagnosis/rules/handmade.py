"""Batches that the script makes: on the training thread, in threads and processes of its own, behind a loader."""

from __future__ import annotations

from fulltilt.diagnosis.evidence import Evidence, waited_behind_loaders_s
from fulltilt.diagnosis.gains import Gain, amdahl, by_removing, gain
from fulltilt.diagnosis.rules.staffing import unplanned_workers
from fulltilt.diagnosis.rules.wording import at, costliest_line, found, line_cost, rewritten, time_spent
from fulltilt.figures import percent
from fulltilt.records import Finding, HotLine, LoaderRecord


def made_by_hand(evidence: Evidence) -> Finding:
    """The finding for a job without a loader."""
    wait_s = evidence.buckets.data_wait_s
    share = evidence.active_share(wait_s)
    line = costliest_line(evidence) if evidence.loader else next(iter(evidence.host_lines), None)
    if line and line.waits:
        return _made_elsewhere(evidence, line)
    facts = [
        time_spent(evidence, "making batches", wait_s),
        "no DataLoader was seen: the training thread makes each batch itself",
    ]
    if line:
        facts.append(line_cost(line))
    fix = (
        f"Make the next batch while this one trains: put the code{at(line.where if line else None)} into a "
        "torch.utils.data.IterableDataset that yields whole batches, and draw them from "
        "DataLoader(dataset, batch_size=None, num_workers=1); one worker keeps their order."
    )
    predicted = _gain_beside_training(evidence, share)
    return found(evidence, "input_serial", wait_s, facts, fix, line.where if line else None, predicted)


def _made_elsewhere(evidence: Evidence, line: HotLine) -> Finding:
    wait_s = evidence.buckets.data_wait_s
    facts = [
        time_spent(evidence, "waiting for batches", wait_s),
        "no DataLoader was seen: threads, processes or an event loop of the script's own bring the batches",
        line_cost(line),
    ]
    fix = (
        f"{line.call or line.function}{at(line.where)} waits for batches that the script makes elsewhere: let more "
        "threads or processes make them side by side, begin with each one earlier (a longer queue, more requests under "
        "way), or make each of them cheaper."
    )
    predicted = by_removing(evidence.active_share(wait_s), evidence.thresholds.recovered_low)
    return found(evidence, "input_serial", wait_s, facts, fix, line.where, predicted)


def made_behind_loader(evidence: Evidence, loader: LoaderRecord) -> Finding:
    """The finding for a generator that takes its time with what a loader gave it."""
    wait_s = evidence.buckets.data_wait_s
    behind_s = waited_behind_loaders_s(evidence.rank, wait_s)
    line = next(iter(evidence.host_lines), None)
    facts = [
        time_spent(evidence, "waiting for batches", wait_s),
        f"{percent(behind_s / wait_s)} of it is not the loader{at(loader.where)}: the script's own generator works on "
        "what it draws from there, in the training thread",
    ]
    if line:
        facts.append(line_cost(line))
    workers = max(loader.num_workers, 1)
    fix = (
        f"Let workers do what the code{at(line.where if line else None)} does to each batch: put it into the data set "
        f"or the collate_fn of the loader, {rewritten(evidence, loader, num_workers=workers, persistent_workers=True)}"
        f"{at(loader.where)}."
    )
    predicted = _gain_beside_training(evidence, evidence.active_share(behind_s))
    return found(evidence, "input_serial", wait_s, facts, fix, line.where if line else None, predicted)


def drawn_by_own_thread(evidence: Evidence, loader: LoaderRecord) -> Finding:
    """The finding for a loader without workers that a thread of the script's draws from, beside the training.

    One worker would do no more than that thread does.
    """
    wait_s = evidence.buckets.data_wait_s
    workers = max(unplanned_workers(evidence), 2)
    facts = [
        time_spent(evidence, "waiting for data", wait_s),
        "num_workers=0: a thread of the script's own fetches one batch after another, beside the training",
    ]
    if line := next((line for line in evidence.host_lines if line.waits), None):
        facts.append(line_cost(line))
    fix = (
        f"Set num_workers={workers}{at(loader.where)}: "
        f"{rewritten(evidence, loader, num_workers=workers, persistent_workers=True)}. One worker would fetch no "
        "faster than the script's own thread does; several fetch side by side."
    )
    most = min(workers * (1 + evidence.thresholds.rate_error), amdahl(evidence.active_share(wait_s)))
    return found(evidence, "input_serial", wait_s, facts, fix, loader.where, gain(1.0, most))


def _gain_beside_training(evidence: Evidence, share: float) -> Gain:
    """One worker hides the shorter of making batches and training on them; more workers divide what one needs."""
    helpers = max(int(evidence.usable_cpus) - 1, 1)
    one, several = 1 / max(share, 1 - share), 1 / max(share / helpers, 1 - share)
    return gain(1 + (one - 1) * evidence.thresholds.recovered_low, several)
