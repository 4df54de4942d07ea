"""Which task of a job this is, by what launchers say."""

import pytest

from fulltilt.recorder.launchers import launched_task, task_name
from fulltilt.records import Task

SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
MEET = {"MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"}
NODES = "torchrun --nnodes=2 --node-rank 1 --rdzv-endpoint=gpu01:29500"


@pytest.mark.parametrize(
    ("command", "variables", "task"),
    [
        ("train.py", SLURM, Task("slurm-77.0", 3, 4)),
        ("train.py", SLURM | {"SLURM_RESTART_COUNT": "2"}, Task("slurm-77.0", 3, 4, 2)),
        (f"{NODES} train.py", SLURM, Task("slurm-77.0", 3, 4)),
        # torchrun --no-python fulltilt run train.py
        ("train.py", MEET | {"RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "a"}, Task("a", 1, 8)),
        ("train.py", MEET | {"RANK": "1", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"}, Task("gpu01:29500", 1, 8)),
        (
            "train.py",
            SLURM | {"RANK": "9", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "none"},
            Task("slurm-77.0", 9, 16),
        ),
        # Kubeflow's PyTorchJob, mpirun
        ("train.py", MEET | {"RANK": "1", "WORLD_SIZE": "2"}, Task("gpu01:29500", 1, 2)),
        (
            "train.py",
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "m"},
            Task("m", 0, 2),
        ),
        # horovodrun without MPI
        (
            "train.py",
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"},
            Task("4711", 1, 2),
        ),
        # started by hand on each node
        (f"{NODES} train.py --nnodes 9", {}, Task("gpu01:29500", 1, 2)),
        (f"{NODES} --rdzv_id run7 train.py", {}, Task("run7", 1, 2)),
        ("torchrun --nnodes 1:4 --rdzv-id=e -m pkg.train", {}, Task("e", None, None)),
        ("torchrun train.py", {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ID": "p"}, Task("p", 1, 2)),
        ("accelerate launch --num_machines 2 --machine_rank 1 --main_process_ip h t.py", {}, Task("h", 1, 2)),
        ("torchrun train.py", {"JOBSET_NAME": "s", "JOB_COMPLETION_INDEX": "1"}, Task("s", 1, None)),
        ("torchrun train.py", {"JOBSET_NAME": "s", "JOBSET_RESTART_ATTEMPT": "1"}, Task("s", None, None, 1)),
    ],
)
def test_a_launcher_says_which_task_of_which_job(command: str, variables: dict[str, str], task: Task) -> None:
    assert launched_task(command.split(), variables) == task


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ("train.py", {}),
        ("train.py --nnodes 4", {}),
        ("-m pkg.train --nnodes=4 --master-addr=h", {}),
        ("torchrun --nproc-per-node=8 train.py", MEET),
        ("torchrun --nnodes=1 --rdzv-id=x train.py", {}),
        ("train.py", {"RANK": "0", "WORLD_SIZE": "1", **MEET}),
        ("train.py", SLURM | {"SLURM_STEP_NUM_TASKS": "1"}),  # an interactive shell
        ("train.py", {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}),  # the batch script itself
    ],
)
def test_a_job_on_one_machine_is_no_task(command: str, variables: dict[str, str]) -> None:
    assert launched_task(command.split(), variables) is None


def test_folders_of_tasks_sort_by_number() -> None:
    assert task_name(Task("j", 3, 512), "gpu 03.cluster") == "003-gpu-03"
    assert task_name(Task("j"), "gpu03") == "gpu03"
