"""Ray Train over a local cluster of two nodes, with Ray Data: every worker is recorded, and read as one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt import store
from fulltilt.diagnosis import answer

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO_NODES = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import ray
from ray.cluster_utils import Cluster
small = dict(num_cpus=2, object_store_memory=200 * 2**20)
cluster = Cluster(initialize_head=True, head_node_args=dict(small, num_cpus=3, include_dashboard=False))
cluster.add_node(**small)
ray.init(address=cluster.address, runtime_env=dict(env_vars=dict(PYTHONPATH=":".join(sys.path))))
import ray_train
ray_train.main(sys.argv[1])
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ray_nodes_make_one_report(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    out = tmp_path / "job"
    done = subprocess.run([sys.executable, "-c", TWO_NODES, str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    run = store.load(out)
    assert run.run.task is not None
    assert (run.run.task.job, [rank.rank for rank in run.ranks]) == ("example", [0, 1])
    assert answer(run).throughput.steps == 100
    assert answer(run).throughput.samples == 1600
    assert {loader.made_by for rank in run.ranks for loader in rank.loaders if loader.batches} == {"ray"}
