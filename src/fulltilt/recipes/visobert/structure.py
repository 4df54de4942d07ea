"""A model that remembers its own structure.

Hugging Face's Trainer walks through all modules several times in each step: for ``train()``, ``zero_grad()`` and
``parameters()``. For a network of BERT-base's depth that is milliseconds of Python in which a GPU runs dry.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def remember(model: torch.nn.Module) -> None:
    """Answer those three from what is known. For a model whose modules and parameters stay the ones they are."""
    parameters = list(model.parameters())
    walk, switch = model.parameters, model.train

    def known_parameters(recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return iter(parameters) if recurse else walk(recurse=False)

    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def train(mode: bool = True) -> Any:
        return model if model.training is mode else switch(mode)

    model.parameters = known_parameters  # type: ignore[method-assign]
    model.zero_grad = zero_grad  # type: ignore[method-assign]
    model.train = train  # type: ignore[method-assign]
    model.train(not model.training).train(not model.training)  # every module is in one mode from here on
