"""Attention masks in the form that no model has to look into.

Given a mask [batch, width], transformers asks the device in every forward whether anything is padded at all
(``padding_mask.all()``), and the host waits for the answer while the GPU runs dry. A mask [batch, 1, width, width] is
taken as it is.
"""

from __future__ import annotations

from typing import Any

import torch

WIDTH, PADDED_FROM = 8, 5


def whole(mask: torch.Tensor) -> torch.Tensor:
    """[batch, width] of 0 and 1 as [batch, 1, width, width] of false and true, without taking more memory."""
    return mask.bool()[:, None, None, :].expand(-1, -1, mask.shape[1], -1)


def answers_alike(model: Any, pad_id: int) -> bool:
    """Whether a model says the same of a padded text under either mask; tried out, since each has its own code."""
    device = next(model.parameters()).device
    ids = torch.arange(2 * WIDTH, device=device).view(2, WIDTH) % model.config.vocab_size
    ids = torch.where(ids == pad_id, (pad_id + 1) % model.config.vocab_size, ids)
    mask = torch.ones_like(ids)
    ids[1, PADDED_FROM:], mask[1, PADDED_FROM:] = pad_id, 0
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            plain, other = (model(input_ids=ids, attention_mask=given).logits for given in (mask, whole(mask)))
        return bool(torch.allclose(plain.float(), other.float(), rtol=1e-3, atol=1e-4))
    except Exception:  # whatever a model says to a mask that it does not know
        return False
    finally:
        model.train(training)
