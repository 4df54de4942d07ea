"""Every number that a judgement depends on, in one place, each with the reason for its value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Shares are of the time after start-up unless the name says otherwise; 0.1 is a tenth."""

    # -- severity, by the share of time that a finding costs
    warn_share: float = 0.10  # Amdahl: a tenth can win at most 1.11 ×; less is not worth changing a job for
    severe_share: float = 0.30  # a third can win 1.4 × and more: the first thing to do

    # -- how long a run must be to be judged
    longest_too_short_s: float = 1.0  # of training: a hundred stack samples, each worth one per cent

    # -- a job hangs: at least this long after its last step, and this many times the length of a step
    hung_s: float = 10.0  # a save or an epoch restart takes less in most jobs
    hung_steps: float = 20.0  # where a step alone takes seconds
    silent_s: float = 5.0  # a process writes its record every second: it was stopped, or its machine is gone

    slowing_least_s: float = 8.0  # of training, before early and late are compared: caches and clocks have settled
    slowing_growth: float = 0.25  # of a step; other jobs and caches change steps by a tenth, and not steadily

    # -- the smallest share that is reported (below warn_share it is a remark after a healthy verdict)
    data_wait_share: float = 0.05  # a healthy loader's next() costs 1 to 3 % on small CPU jobs
    epoch_restart_share: float = 0.05  # one pass of a minute loses 1 to 2 s to respawned workers
    transfer_share: float = 0.05  # pinned, overlapped copies leave under 1 % of idle time
    sync_share: float = 0.05  # one .item() a step at a full queue costs about the launch latency, 1 to 3 %
    short_kernel_s: float = 25e-6  # about what a launch costs the host on a current machine
    launch_share: float = 0.10  # short gaps between kernels are normal; a tenth idle means the host sets the pace
    seldom_code_part: float = 0.8  # of the host code is in few steps: then it does not come with every step
    seldom_steps_share: float = 0.1  # one step in ten or fewer
    guilty_function_share: float = 0.25  # of host code; a trainer's own overhead is dozens of functions with 2 to 12 %
    telling_line_share: float = 0.02  # of a cause; a line below that was in a stack sample or two, by chance
    host_code_share: float = 0.05  # progress bars and schedulers stay under 3 % of a 10 ms step
    launch_contended_share: float = 0.05  # a thread gets a free CPU within microseconds: usually under 1 %
    busy_thread_share: float = 0.10  # writers of logs and progress bars stay under 2 %
    gil_contended_share: float = 0.05  # a thread that computes alone runs in 99 % of its time on a quiet machine
    cpus_full_share: float = 0.6  # of the usable CPUs kept busy by the job: then the job itself is why none is free
    validation_share: float = 0.20  # validation is wanted work; people accept up to a fifth of the job
    small_validation_share: float = 0.05  # of the whole wall time: by Amdahl, less is not worth changing
    recompiling_share: float = 0.03  # a last, smaller batch costs one recompilation; hours of training hide it
    gc_share: float = 0.03  # a loop of tensors collects in well under 1 % of its time
    checkpoint_share: float = 0.05  # a checkpoint every few minutes costs under 2 %
    straggler_share: float = 0.05  # ranks on one machine differ by 1 to 3 % without any cause
    searches_in_vain: int = 4  # steps without an unused parameter; parts that are skipped sometimes show by then
    late_share: float = 0.05  # of a step: any rank is late by less than that now and then
    steady_share: float = 0.6  # of the steps with a late rank: the same one in most of them
    steady_host_share: float = 0.8  # the same for all ranks of a machine: one of several is last more often by chance
    slowed_down: float = 0.8  # of a rank's speed in its first steps: worth mentioning where it is the late one
    chance: float = 1e-3  # how likely equal ranks may look so unequal: thousands of runs are judged
    wandering_share: float = 0.10  # one rank late, then another; schedulers alone cost 3 to 6 % on a busy machine
    communication_share: float = 0.10  # DDP overlaps the exchange with backward, except for its last bucket

    # -- which part of the loader is its bottleneck
    cpu_bound_share: float = 0.5  # more than half of a fetch on, or queueing for, a CPU: computing, not waiting
    idle_workers_share: float = 0.3  # workers that idle for a third of their time are fast enough
    storage_read_bytes_per_s: float = 1e6  # less than a megabyte a second keeps no disk and no network busy
    small_read_bytes: float = 48e3  # PIL reads large files in pieces of 64 KiB; below, files are small or scattered
    cold_factor: float = 3.0  # how many times as much a first pass must read, and wait, as later ones
    cold_bytes: float = 10e6  # less is read within a second by any disk
    slow_first_batch: float = 2.0  # times a later one: then it also imports modules, compiles or opens files
    later_batches: int = 8  # fewer say less of what a batch costs than all of them
    pickled_bytes: float = 10e6  # a worker's arguments without data take kilobytes
    pickling_start_s: float = 5.0  # of start-up: long enough to be annoying
    many_tensors: int = 64  # in a batch; on two CPUs 151 of them took 100 ms to hand over
    handover_share: float = 0.5  # more CPU in pickling and rebuilding than in fetching, or than in real waiting
    sampling_share: float = 0.5  # of the fetching: workers could take over the smaller part only
    cheap_fetch_share: float = 0.5  # of the wait for a batch: fetching it on the training thread would halve the wait
    spare_capacity: float = 2.0  # workers that could give twice what arrives are fast enough, too
    after_loader_share: float = 0.5  # of the wait: the larger part has to change
    starved_share: float = 0.9  # training that waits nine tenths of its time takes all that the loader gives
    never_idle_share: float = 0.05  # workers idle less than this are at their full rate
    queueing_share: float = 0.4  # two runnable processes for each CPU queue half of their time
    affinity_queueing_share: float = 0.2  # two on one CPU queue half of their time; other jobs cost a tenth
    threads_per_cpu: float = 2.0  # workers and threads for each usable CPU: from here on they make each other queue
    no_cpu_free: float = 0.9  # of all CPUs in use, on average: there is hardly a free one
    loading_cpu_share: float = 0.15  # of the CPUs that a job computes on: without loading, compute has a fifth more
    beside_compute_share: float = 0.02  # of the CPUs: more than the error of a rate
    others_share: float = 0.4  # of the CPUs that the job may use: from here on others make it queue

    # -- what to expect from a change
    recovered_low: float = 0.5  # half of a cause removed is the cautious end of a prediction
    scaling_low: float = 0.6  # COD on 16 cores: 8 workers gave 0.88 of the serial rate each, 12 gave 0.51 each
    cpu_room: float = 1.25  # two cores, each 90 % busy with training: a worker beside it won nothing, 0.97 to 1.03 ×
    handing_over_s: float = 0.002  # a small batch from a worker to the training thread, on two busy Arm cores
    # Rates of one job in two runs differ by so much: a prediction from one cannot be truer (docs/benchmarks/tuning.md).
    rate_error: float = 0.08
    in_vain_share: float = 0.5  # of the data wait: one wait that never ends makes the rates mean nothing
    deep_queue: int = 8  # batches per worker: a longer queue evens out no more
    contended_share: float = 0.3  # of fetching: two workers that share one lock all the time wait half of theirs
    worker_headroom: float = 1.15  # more workers than just needed, so that uneven batches do not empty the queue
    waiting_workers_per_cpu: float = 4.0  # workers that wait for storage use little CPU; more than this only add RAM
    oversubscription_loss: float = 2.1  # CLIP on 16 cores: 1489 samples/s at 12 workers, 712 at 16
    async_checkpoint_part: float = 0.2  # copying a state to host memory takes about a fifth of serialising it
    stray_part: float = 0.05  # of saving or validating: so much may be booked elsewhere, since stacks are only sampled
    checkpoint_target_share: float = 0.02  # to which "save every k-th time" brings a checkpoint
    waiting_validation_share: float = 0.2  # of validation, spent waiting for data: then workers are worth their start
    validation_target_share: float = 0.10  # to which "validate every k-th time" brings validation

    # -- the GPU
    compute_dominates: float = 0.5  # from here on what the GPU does matters more than what it waits for
    full_tilt_share: float = 0.85  # the best published input pipelines reach 0.85 to 0.93 of their compute limit
    low_sm_active: float = 0.5  # half of the multiprocessors without work while a kernel runs
    real_sm_active_pct: float = 70.0  # dense training reaches 70 to 95 % SM active
    high_util_pct: float = 90.0  # what people call "100 %"
    low_util_pct: float = 30.0  # below it users ask why their GPU idles
    vram_mostly_free_share: float = 0.5  # under half used, twice the batch fits (weights do not grow with it)
    vram_full_share: float = 0.95  # above, the allocator begins to free and retry
    padding_share: float = 0.25  # sorted batches of text keep 5 to 10 % padding; a quarter is worth buckets
    switch_share: float = 0.03  # of the kernel time: less is not worth a line of code
    convolution_share: float = 0.3  # of the kernel time, from which on their algorithm matters
    few_shapes: int = 2  # of batches: one, and that of the last, smaller one
    many_shapes: int = 8  # of batches: each new one costs cuDNN a search
    fp32_to_half_speed: tuple[float, float] = (1.3, 3.0)  # tensor cores against plain fp32, whole networks
    tf32_to_half_speed: tuple[float, float] = (1.1, 1.8)  # half the bytes and twice the rate of TF32
    tensor_cores_used_share: float = 0.1  # of the time: an fp32 job with this much uses TF32 whatever its flags say
    throttled_share: float = 0.10  # of the samples; shorter spells are boost clocks settling
    idle_gpu_pct: float = 5.0  # of the time: below, no other process computes on that GPU
    power_capped_clock: float = 0.85  # a GPU at its power limit is fine unless its clock falls below this

    # -- the machine
    ram_full_share: float = 0.92  # of the limit; the kernel starts to reclaim hard and the OOM killer is near
    swap_in_bytes_per_s: float = 1e6  # reading back a megabyte of swap each second is thrashing, not tidying up
    growth_seen_s: float = 3.0  # of growth in the later half of its life: buffers that fill at first are full then
    stream_growth_s: float = 120.0  # the same of an IterableDataset, which may fill a shuffle buffer of gigabytes first
    growth_passes: float = 3.0  # over the data set, by each worker: in random order it has then met 95 % of the samples
    growth_bytes: float = 16e6  # of one worker meanwhile; allocators vary by a few megabytes
    shm_share: float = 0.5  # of /dev/shm: uneven batches and several ranks can double the estimate

    # -- the checklist
    check_memory_share: float = 0.30
    check_util_pct: float = 80.0
    check_speed_share: float = 0.80  # of the compute ceiling


THRESHOLDS = Thresholds()
