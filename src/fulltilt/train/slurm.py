"""Ranks that Slurm's srun started without torchrun in between, in the words that torch.distributed knows."""

from __future__ import annotations

import re
from collections.abc import Mapping

# The ports that no service and no outgoing connection takes for itself.
_PORTS = range(20_000, 32_000)


def torch_environment(env: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a task of an srun step. Pure.

    Empty outside a step of several tasks: a batch script is no rank. What is set already stays as it is.
    """
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env or tasks == "1":
        return {}
    numbers = [env.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(number) if number.isdigit() else 0 for number in numbers)
    found = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": _tasks_on(env.get("SLURM_NODEID", "0"), env.get("SLURM_STEP_TASKS_PER_NODE", "1")),
        "MASTER_ADDR": first_host(env.get("SLURM_STEP_NODELIST", "")) or "127.0.0.1",
        "MASTER_PORT": str(_PORTS[(job * 16 + step) % len(_PORTS)]),  # alike on all ranks, another for each step
    }
    return {name: env.get(name, value) for name, value in found.items()}


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: ``gpu[03-05,9]`` gives ``gpu03``."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _tasks_on(node: str, tasks_per_node: str) -> str:
    """``2(x3),1`` are two tasks on each of three nodes and one on the fourth."""
    counts = [
        count for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node) for _ in range(int(times or 1))
    ]
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else "1"
