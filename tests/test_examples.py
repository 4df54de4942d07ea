"""The launcher templates: each is run, or checked as its launcher would read it."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fulltilt import store
from fulltilt.recorder.launchers import launched_task
from fulltilt.records import Task

EXAMPLES = Path(__file__).parents[1] / "examples"
# What a Slurm of two nodes does with a step of one task a node, as far as a job can see it.
SRUN = """#!/bin/bash
for n in 0 1; do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$n SLURM_NODEID=$n "$@" &
done
code=0
for job in $(jobs -p); do wait $job || code=$?; done
exit $code
"""
SCONTROL = "#!/bin/bash\nprintf 'localhost\\nlocalhost\\n'\n"


def fake(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sbatch_file_records_both_nodes(tmp_path: Path) -> None:
    fake(tmp_path, "srun", SRUN)
    fake(tmp_path, "scontrol", SCONTROL)
    bin_folder = EXAMPLES.parent / ".venv/bin"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{bin_folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "RANKS_A_NODE": "2",
        "STEPS": "40",
        "TRAIN": str(EXAMPLES / "train.py"),
    }
    command = ["bash", str(EXAMPLES / "slurm.sbatch")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    run = store.load(tmp_path / "fulltilt-runs/train-77")
    assert run.run.task == Task("slurm-77.0", 0, 2)
    assert [(rank.rank, rank.steps) for rank in run.ranks] == [(rank, 40) for rank in range(4)]
    assert done.stderr.count("report: ") == 1


def container(spec: Any, *path: str) -> Any:
    for part in path:
        assert part in spec, f"{part} is missing"
        spec = spec[part]
    return spec


def test_the_jobset_says_which_node_of_which_job() -> None:
    jobset = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = container(jobset, "spec", "replicatedJobs")
    spec = container(job, "template", "spec")
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (2, 2, "Indexed")
    pod = container(spec, "template", "spec")
    (train,) = pod["containers"]
    mounted = {mount["name"] for mount in train["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    names = {variable["name"] for variable in train["env"]}
    assert names == {"JOBSET_NAME", "JOBSET_RESTART_ATTEMPT"}
    given = {"JOBSET_NAME": "train", "JOBSET_RESTART_ATTEMPT": "1", "JOB_COMPLETION_INDEX": "1"}
    line = train["command"][2]
    for name, value in given.items():
        line = line.replace(f"${name}", value)
    words = shlex.split(line)
    assert launched_task(words[words.index("--") + 1 :], given) == Task("train", 1, 2, 1)


def test_the_compose_file_starts_two_nodes_of_one_job() -> None:
    compose = yaml.safe_load((EXAMPLES / "docker-compose.yaml").read_text())
    tasks = []
    for name, service in compose["services"].items():
        assert service["hostname"] == name
        assert "./runs:/runs" in service["volumes"]
        words = shlex.split(service["command"])
        assert words[: words.index("--")] == ["fulltilt", "run", "--out", "/runs/train"]
        tasks.append(launched_task(words[words.index("--") + 1 :], {}))
    assert tasks == [Task("node0:29500", 0, 2), Task("node0:29500", 1, 2)]
