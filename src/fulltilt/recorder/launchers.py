"""Which of several tasks of a job this one is, by its launcher (torchrun, srun, mpirun, Kubernetes)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fulltilt.records import Task

# Launchers that are Python programs: found beside this interpreter first, so that they start the same Python.
LAUNCHERS = {"torchrun": ("-m", "torch.distributed.run"), "accelerate": ("-m", "accelerate.commands.accelerate_cli")}
# Launchers that have the other nodes on their command line.
OVER_NODES = (*LAUNCHERS, "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
# Their options for the number of nodes, this node's own, and the rendezvous; torchrun also reads PET_ variables.
NODES = ("nnodes", "num_machines")
THIS_NODE = ("node_rank", "machine_rank")
ADDRESS, PORT = ("master_addr", "main_process_ip"), ("master_port", "main_process_port")
# Launchers that start one process per rank: their variables for its number, the number of all, and the job.
RANKED = (
    ("RANK", "WORLD_SIZE", ()),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    ("PMI_RANK", "PMI_SIZE", ("PMI_JOBID",)),
    ("HOROVOD_RANK", "HOROVOD_SIZE", ("HOROVOD_GLOO_RENDEZVOUS_PORT",)),
)


def launched_task(arguments: Sequence[str], environment: Mapping[str, str]) -> Task | None:
    """Which of several tasks of a job this one is, by its launcher; None where it is the only one.

    The job's id is the launcher's, so that all tasks, also after a requeue, have the same without exchanging a message.
    Where there is none, it is the address at which the ranks meet.
    """
    given = {name: value for name, value in environment.items() if value}
    options = _command_line(arguments)
    for name, value in given.items():
        if name.startswith("PET_"):
            options.setdefault(name.removeprefix("PET_").lower(), value)
    restart = _number(given, *RESTARTS, otherwise=0)
    address = _first(options, *ADDRESS) or given.get("MASTER_ADDR")
    port = _first(options, *PORT) or given.get("MASTER_PORT")
    meeting = options.get("rdzv_endpoint") or (f"{address}:{port}" if address and port else address)
    ids = (options.get("rdzv_id"), given.get("TORCHELASTIC_RUN_ID"))
    rendezvous = next((name for name in ids if name not in (None, "none")), None)  # torchrun's word for none
    jobset = given.get("JOBSET_NAME")
    slurm = None
    if "SLURM_JOB_ID" in given and "SLURM_STEP_ID" in given:  # a batch script itself is no step
        slurm = f"slurm-{given['SLURM_JOB_ID']}.{given['SLURM_STEP_ID']}"

    for rank, world_size, names in RANKED:
        job = rendezvous or slurm or jobset or _first(given, *names) or meeting
        if rank in given and _number(given, world_size) > 1 and job is not None:
            return Task(job, _number(given, rank), _number(given, world_size), restart)
    tasks = _number(given, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if slurm is not None and tasks > 1:
        return Task(slurm, _number(given, "SLURM_PROCID", otherwise=0), tasks, restart)
    nodes = [int(part) for part in (_first(options, *NODES) or "1").split(":") if part.isdecimal()]
    job = jobset or rendezvous or meeting
    if job is not None and (jobset is not None or max(nodes, default=1) > 1):
        number = _first(options, *THIS_NODE) or given.get("JOB_COMPLETION_INDEX", "")
        count = nodes[0] if len(nodes) == 1 and nodes[0] > 1 else None  # else it is elastic
        return Task(job, int(number) if number.isdecimal() else None, count, restart)
    return None


RESTARTS = ("SLURM_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT", "TORCHELASTIC_RESTART_COUNT")


def task_name(task: Task, hostname: str) -> str:
    """The name of a task's folder: its number and its machine."""
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", hostname.partition(".")[0]) or "node"
    return host if task.number is None else f"{task.number:0{len(str((task.count or 1) - 1))}d}-{host}"


def _command_line(arguments: Sequence[str]) -> dict[str, str]:
    """The options of a launcher, `--nnodes=2` and `--nnodes 2`, up to the script; - and _ are the same."""
    options: dict[str, str] = {}
    if not any(Path(argument).name in OVER_NODES for argument in arguments[:3]):
        return options
    for index, argument in enumerate(arguments):
        if argument.endswith(".py"):
            break
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            options.setdefault(name.replace("-", "_"), value if equals else following)
    return options


def _first(values: Mapping[str, str], *names: str) -> str | None:
    return next((values[name] for name in names if values.get(name)), None)


def _number(values: Mapping[str, str], *names: str, otherwise: int = 1) -> int:
    value = _first(values, *names) or ""
    return int(value) if value.isdecimal() else otherwise
