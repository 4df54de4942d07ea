"""What a launcher (torchrun, srun, mpirun, Kubernetes) says of its job: which of several tasks this one is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fulltilt.records import Task

# Launchers that are Python programs: found beside this interpreter first, so that they start the same Python.
LAUNCHERS = {"torchrun": ("-m", "torch.distributed.run"), "accelerate": ("-m", "accelerate.commands.accelerate_cli")}
# Launchers that are told of other nodes on their command line.
OVER_NODES = (*LAUNCHERS, "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
# How launchers on the command line name the number of nodes, this node's own, and where the nodes meet; torchrun reads
# the same from variables that begin with PET_.
NODES = ("nnodes", "num_machines")
THIS_NODE = ("node_rank", "machine_rank")
ADDRESS, PORT = ("master_addr", "main_process_ip"), ("master_port", "main_process_port")
# Launchers that start one process a rank, by the variables for this one's number, the number of all, and the job.
RANKED = (
    ("RANK", "WORLD_SIZE", ()),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    ("PMI_RANK", "PMI_SIZE", ("PMI_JOBID",)),
    ("HOROVOD_RANK", "HOROVOD_SIZE", ("HOROVOD_GLOO_RENDEZVOUS_PORT",)),
)


def launched_task(arguments: Sequence[str], environment: Mapping[str, str]) -> Task | None:
    """Which of several tasks of a job this one is, by what its launcher has said; None where it is the only one.

    The job's id is the launcher's own, so that all tasks, and those of a requeue, have the same without a word between
    them. Where it has none they have the address in common at which the ranks meet.
    """
    given = {name: value for name, value in environment.items() if value}
    told = _command_line(arguments)
    for name, value in given.items():
        if name.startswith("PET_"):
            told.setdefault(name.removeprefix("PET_").lower(), value)
    restart = _number(given, *RESTARTS, otherwise=0)
    address = _first(told, *ADDRESS) or given.get("MASTER_ADDR")
    port = _first(told, *PORT) or given.get("MASTER_PORT")
    meeting = told.get("rdzv_endpoint") or (f"{address}:{port}" if address and port else address)
    ids = (told.get("rdzv_id"), given.get("TORCHELASTIC_RUN_ID"))
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
    nodes = [int(part) for part in (_first(told, *NODES) or "1").split(":") if part.isdecimal()]
    job = jobset or rendezvous or meeting
    if job is not None and (jobset is not None or max(nodes, default=1) > 1):
        number = _first(told, *THIS_NODE) or given.get("JOB_COMPLETION_INDEX", "")
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
    told: dict[str, str] = {}
    if not any(Path(argument).name in OVER_NODES for argument in arguments[:3]):
        return told
    for index, argument in enumerate(arguments):
        if argument.endswith(".py"):
            break
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            told.setdefault(name.replace("-", "_"), value if equals else following)
    return told


def _first(values: Mapping[str, str], *names: str) -> str | None:
    return next((values[name] for name in names if values.get(name)), None)


def _number(values: Mapping[str, str], *names: str, otherwise: int = 1) -> int:
    value = _first(values, *names) or ""
    return int(value) if value.isdecimal() else otherwise
