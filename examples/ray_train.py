"""Ray Train with Ray Data, recorded on every worker: ``python examples/ray_train.py /shared/runs/a``.

All that Fulltilt needs is ``recorded(...)`` around the training loop, and a folder that all nodes share.
"""

import os
import sys
from pathlib import Path

import ray.data
import ray.train
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig

from fulltilt.integrations.ray import recorded


def train_loop(config: dict[str, int]) -> None:
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = ray.train.get_dataset_shard("train")
    for _ in range(config["epochs"]):
        for batch in data.iter_torch_batches(batch_size=8):
            inputs = batch["id"].float().unsqueeze(1) / 1000
            loss = torch.nn.functional.cross_entropy(model(inputs), batch["id"] % 4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main(folder: str, workers: int = 2) -> None:
    trainer = ray.train.torch.TorchTrainer(
        recorded(train_loop, folder),
        train_loop_config={"epochs": 2},
        datasets={"train": ray.data.range(800)},
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=bool(os.environ.get("USE_GPU")), placement_strategy="SPREAD"
        ),
        run_config=RunConfig(name="example", storage_path=f"{folder}-ray"),
    )
    trainer.fit()


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
