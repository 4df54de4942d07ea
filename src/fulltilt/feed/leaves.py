"""One value of a sample as a tensor of fixed shape, and back: tensors, arrays, images and numbers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

_IMAGE_MODES = {"RGB": 3, "L": 1, "RGBA": 4}


class Unstorable(Exception):  # noqa: N818 - a verdict about a sample, caught by the loader
    """A sample holds something that cannot be kept as a fixed-shape tensor; the message says what and where."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of a sample: where it lies in the row, and what it has to become again."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int
    kind: str  # "tensor", "array", "image:RGB", "int", "float" or "bool"
    wrapper: type | None = None  # a tensor subclass (torchvision's tv_tensors), needed by transforms that look at it
    stacked: type | None = None  # what torch makes of several: that subclass again, or a plain tensor

    def describe(self) -> str:
        """The leaf in words, for messages and for the key of a cache."""
        return f"{self.path or 'sample'}: {self.kind} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def stacked_type(value: torch.Tensor) -> type | None:
    """The subclass that torch makes of several such values; None for a plain tensor."""
    try:
        made = type(torch.stack([value, value]))
    except Exception:  # the subclass's own code
        return None
    return None if made is torch.Tensor else made


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor of the host, one after the other."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # Not a view: torch calls one element contiguous whatever its stride is, and then refuses to see it as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def is_image(value: Any) -> bool:
    """Whether ``value`` is a PIL image; PIL is not imported for the question."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def _is_array(value: Any) -> bool:
    module = sys.modules.get("numpy")
    return module is not None and isinstance(value, module.ndarray | module.generic)


def kind_of(value: Any) -> str:
    """What a value is, as ``Leaf.kind`` has it."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if is_image(value):
        return f"image:{value.mode}"
    if _is_array(value):
        return "array"
    return type(value).__name__


def as_tensor(value: Any, path: str) -> torch.Tensor:
    """A leaf as default_collate would turn it into a tensor; a PIL image becomes uint8 [channels, height, width]."""
    if isinstance(value, torch.Tensor):
        kind = "quantized" if value.is_quantized else "meta" if value.is_meta else value.layout
        if kind is not torch.strided:
            raise Unstorable(f"{path or 'the sample'} is a {kind} tensor; only dense tensors can be kept")
        return value.detach().cpu().as_subclass(torch.Tensor).contiguous()
    if isinstance(value, bool):
        return torch.tensor(value, dtype=torch.bool)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise Unstorable(f"{path or 'the sample'} is {value}, which does not fit into 64 bits")
        return torch.tensor(value, dtype=torch.int64)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if is_image(value):
        if value.mode not in _IMAGE_MODES:
            raise Unstorable(f"{path or 'the sample'} is an image of mode {value.mode}; convert it to RGB or L")
        flat = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        width, height = value.size
        return flat.view(height, width, _IMAGE_MODES[value.mode]).permute(2, 0, 1).contiguous()
    if _is_array(value):
        try:
            return _array_as_tensor(value) if value.ndim else torch.tensor(value.item(), dtype=_dtype(value))
        except TypeError as error:
            raise Unstorable(
                f"{path or 'the sample'} is an array of {value.dtype}, which torch does not have"
            ) from error
    raise Unstorable(f"{path or 'the sample'} is {type(value).__name__}, which is not a tensor, array, image or number")


def _array_as_tensor(array: Any) -> torch.Tensor:
    """torch takes neither a flipped view nor the other byte order; a data set may return both."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.as_tensor(array).contiguous()


def _dtype(scalar: Any) -> torch.dtype:
    numpy = sys.modules["numpy"]
    return torch.as_tensor(numpy.zeros(1, dtype=scalar.dtype.newbyteorder("="))).dtype
