"""A model that remembers its structure behaves as one that looks it up."""

from __future__ import annotations

import torch
from torch import nn

from fulltilt.recipes.visobert.model import remember_structure


class Counting(nn.Module):
    """Counts how often somebody walked down to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        self.walks = 0

    def train(self, mode: bool = True) -> Counting:
        """See Module."""
        self.walks += 1
        return super().train(mode)


def test_training_mode_reaches_every_module_when_it_changes_and_only_then() -> None:
    model = Counting()
    model.inner[1].eval()  # left in another mode by whoever made the model
    remember_structure(model)
    assert all(module.training for module in model.modules())
    before = model.walks
    for _ in range(5):
        assert model.train() is model
    assert model.walks == before
    model.eval()
    assert not any(module.training for module in model.modules())
    model.train()
    assert all(module.training for module in model.modules())
    assert model.walks == before + 2


def test_parameters_and_gradients_are_those_of_the_model() -> None:
    model = Counting()
    wanted = list(model.parameters())
    remember_structure(model)
    assert [id(p) for p in model.parameters()] == [id(p) for p in wanted]
    assert list(model.parameters(recurse=False)) == []
    model.inner(torch.ones(1, 3)).sum().backward()
    model.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in wanted)
    model.zero_grad()
    assert all(p.grad is None for p in wanted)
