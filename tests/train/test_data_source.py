"""A batch of any structure goes to the device as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pack_sequence

from fulltilt.train.data_source import to_device

META = torch.device("meta")


class Graph:
    """A batch of a class of its own that moves itself."""

    def __init__(self) -> None:
        self.nodes = torch.ones(2)

    def to(self, device: torch.device) -> Graph:
        self.nodes = self.nodes.to(device)
        return self


def test_what_moves_itself_is_moved_beside_tensors() -> None:
    graph, packed = Graph(), pack_sequence([torch.ones(3), torch.ones(2)])
    moved: Any = to_device({"inputs": [torch.ones(2, 3), packed], "graph": graph}, META)
    assert moved["inputs"][0].device == moved["inputs"][1].data.device == META
    assert moved["inputs"][1].batch_sizes.device.type == "cpu"  # torch insists on it
    assert moved["graph"] is graph
    assert graph.nodes.device == META
