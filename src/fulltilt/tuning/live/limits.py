"""When live tuning acts, how long it measures, how much a change must gain, and what workers may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LiveLimits:
    """Shares are of the training thread's time; 0.1 is a tenth."""

    # -- when to act
    enough_wait_share: float = 0.03  # a healthy loader's next() costs 1 to 3 %: there the loader is no longer the limit
    clear_wait_share: float = 0.2  # far above enough_wait_share: a few more batches would not change that
    paid_share: float = 0.02  # two windows of the same setting differ by this much
    sure_errors: float = 1.5  # standard errors; twice these would refuse gains of 5 % on uneven jobs
    clear_gain: float = 1.5  # times as fast: a job's own pace hardly ever changes by this within a trial
    most_moves: int = 8  # most take 9 to 14 s, the settings in force measured again included: two minutes

    # -- how long to measure
    warm_up_batches: int = 2  # the first steps allocate, compile and choose kernels
    least_batches: int = 4
    least_s: float = 3.0  # shorter windows are noise on a shared machine
    most_s: float = 8.0
    settle_s: float = 2.5  # after a switch, prefetched batches make the new pool look faster than it is
    spread: float = 0.025  # a window ends early when its rate is known this well
    shortest_pass: int = 4  # times the batches made ahead: in shorter passes the queue hides how fast batches are made
    pause_s: float = 0.25  # a longer stop between two batches (validation, checkpoint) fills the queue: not counted

    # -- patience with a new pool
    batch_s: float = 15.0  # a batch that takes longer: the pool hangs, or a worker has died
    spawn_s: float = 60.0  # … where workers first import the script and torch (spawn)
    batch_times: float = 20.0  # … or this many times what a batch has taken so far

    # -- capacity
    worker_headroom: float = 1.15  # more workers than the mean rate needs, for uneven batches
    waiting_workers_per_cpu: float = 4.0  # workers that wait for storage use little CPU; more only add memory
    unmeasured_worker_bytes: int = 512 << 20  # a forked worker, until one was measured
    worker_growth: float = 1.25  # a worker's memory still grows after it was measured
    memory_share: float = 0.8  # of what is free; the rest is for the job's own peaks
    shm_share: float = 0.5  # of the free /dev/shm: uneven batches and other ranks can double the estimate
    files_share: float = 0.5  # of the file descriptors left
    files_per_worker: int = 4  # two pipes and a sentinel in the training process
    most_prefetch: int = 8  # deeper queues help no loader whose mean rate is too low


DEFAULT = LiveLimits()
