import torch

from fulltilt.recorder.rank_state import memory_parts


def test_adam_holds_two_states_a_weight() -> None:
    model = torch.nn.Linear(10, 5, bias=False)
    frozen = torch.nn.Linear(10, 5)
    frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 10)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    parts = memory_parts(torch, [optimizer], on_gpu=False)
    step_counter = 4
    assert (parts.parameters, parts.weights_bytes, parts.gradients_bytes) == (50, 200, 200)
    assert parts.optimizer_bytes == 400 + step_counter
    assert parts.other_bytes is None
    assert parts.resident_bytes == 200 + 200 + 400 + step_counter


def test_weights_of_two_optimizers_are_counted_once() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    both = [torch.optim.SGD([weight], 0.1), torch.optim.SGD([weight], 0.1)]
    assert memory_parts(torch, both, on_gpu=False).parameters == 4
