"""A checkpoint that would run code, and one of another model."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fulltilt.errors import DataError, FulltiltError, UsageError
from fulltilt.train import weight_import
from tests.faults import victim


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("form", ["torch", "pickle", "inside"])
def test_malicious_checkpoint(form: str, tmp_path: Path) -> None:
    """Seen to fail: with weights_only=False in `foreign.read_weights` the payload runs."""
    mark, path = tmp_path / "payload-ran", tmp_path / "weights.pth"
    content: Any = Payload(mark)
    if form == "inside":
        content = {"state_dict": {"first.weight": torch.zeros(12, 6)}, "args": content}
    if form == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    with pytest.raises(DataError) as caught:
        weight_import.load_weights(victim.Net(), path)
    assert not mark.exists()
    assert "is refused: it holds more than weights" in caught.value.what
    assert "weights_only" not in str(caught.value)


def test_class_names_in_metadata_mean_nothing(tmp_path: Path) -> None:
    """Seen to fail: nothing here reads metadata; the test stands guard over that."""
    net = victim.Net()
    path = tmp_path / "weights.safetensors"
    save_file(net.state_dict(), path, metadata={"class": "os.system", "format": "posixpath.join"})
    other = victim.Net()
    assert weight_import.load_weights(other, path).complete
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_checkpoint_of_another_model(tmp_path: Path) -> None:
    """Seen to fail: without the comparison in `state.restore`, torch's own RuntimeError reaches the user."""
    victim.run_here(tmp_path / "out", stop_at=4)

    class Wider(victim.Net):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(12, 2)
            self.extra = torch.nn.Linear(1, 1)
            del self.first

    with pytest.raises(UsageError) as caught:
        victim.run_here(tmp_path / "out", changes={"model": Wider()})
    for words in (
        "2 missing in the file: extra.weight, extra.bias",
        "2 unexpected in the file: first.weight, first.bias",
        "2 of another shape: last.weight (1×12 in the file, 2×12 here)",
    ):
        assert words in caught.value.what


def test_foreign_weights_come_over_as_far_as_they_fit(tmp_path: Path) -> None:
    net = victim.Net()
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in net.state_dict().items()}
    del wrapped["module._orig_mod.last.bias"]
    wrapped["module._orig_mod.last.weight"] = torch.zeros(3, 12)
    wrapped["module._orig_mod.head.weight"] = torch.zeros(1)
    torch.save({"state_dict": wrapped, "epoch": 4, "optimizer": {}}, tmp_path / "other.pth")
    other = victim.Net()
    taken = weight_import.load_weights(other, tmp_path / "other.pth")
    assert torch.equal(other.first.weight, net.first.weight)
    assert taken.missing == ("last.bias",)
    assert taken.unexpected == ("head.weight",)
    assert taken.mismatched == ("last.weight (3×12 in the file, 1×12 here)",)


def test_a_run_may_start_from_foreign_weights_and_then_resumes_its_own(tmp_path: Path) -> None:
    torch.save(victim.Net().state_dict(), tmp_path / "other.pth")
    order = victim.Order(tmp_path / "out", resume_from=tmp_path / "other.pth")
    assert victim.exit_code(order) == 0
    assert "tensors taken" in victim.told(order.out)
    assert victim.exit_code(order) == 0
    assert "Resuming from" in victim.told(order.out)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04" + bytes(50)])
def test_what_is_no_checkpoint_at_all(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.pth"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"odd\.pth"):
        weight_import.load_weights(victim.Net(), path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing.pth", "does not exist"),
        (".", "is not a checkpoint folder"),
        ("https://x.org/a.pth", "does not exist"),
        ("pipe.pt", "pipe.pt cannot be read: .*not a regular file"),
        ("pipe.safetensors", "pipe.safetensors cannot be read: .*not a regular file"),
    ],
)
def test_a_path_without_weights(path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pipe.pt", "pipe.safetensors"):
        os.mkfifo(name)
    with pytest.raises(FulltiltError, match=words):
        weight_import.load_weights(victim.Net(), Path(path))


@pytest.mark.parametrize("shape", ["lightning", "params_ema", "half", "folder", "run folder"])
def test_weights_in_the_shapes_people_have_them(shape: str, tmp_path: Path) -> None:
    """Seen to fail: prefixes were only stripped where all names had them; folders were taken for damaged ones."""
    net, path = victim.Net(), tmp_path / "other.ckpt"
    weights = net.state_dict()
    if shape == "lightning":  # beside the model there are its losses and metrics
        torch.save({"state_dict": {**{f"model.net.{n}": t for n, t in weights.items()}, "c.w": torch.ones(1)}}, path)
    elif shape == "params_ema":
        torch.save({"params_ema": weights}, path)
    elif shape == "half":
        torch.save({name: tensor.half() for name, tensor in weights.items()}, path)
    elif shape == "run folder":
        victim.run_here(tmp_path / "out", changes={"model": net}, epochs=1)
        path = tmp_path / "out"
    else:
        path = tmp_path / "model"  # as Hugging Face saves one
        path.mkdir()
        save_file(weights, path / "model.safetensors")
    other = victim.Net()
    taken = weight_import.load_weights(other, path)
    assert not taken.missing
    torch.testing.assert_close(other.first.weight, net.first.weight, rtol=1e-3, atol=1e-3)


def test_what_a_refused_file_holds_is_named(tmp_path: Path) -> None:
    torch.save(victim.Net(), tmp_path / "whole.pth")
    with pytest.raises(DataError, match=r"more than weights \(tests\.faults\.victim\.Net\)"):
        weight_import.load_weights(victim.Net(), tmp_path / "whole.pth")
