"""The tensors of a packed weight: what moves when a weight moves to another process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """All that a product with the weight reads. Writing into the tensors replaces the weight."""

    tensors: tuple[Tensor, ...]
    form: tuple[object, ...] = ()
    """What else the product depends on; weights of one `kind` may take each other's place."""

    @classmethod
    def of(cls, *tensors: Tensor | None, form: tuple[object, ...] = ()) -> "PackedWeight":
        """Without the tensors that there are not."""
        missing = tuple(tensor is None for tensor in tensors)
        return cls(tuple(t for t in tensors if t is not None), (*form, missing))

    @property
    def kind(self) -> str:
        """Equal for weights that may take each other's place, in any process."""
        return repr((self.form, [(tuple(t.shape), str(t.dtype)) for t in self.tensors]))

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


def to_row(weights: Sequence[PackedWeight]) -> Tensor:
    """[num_bytes] uint8: the tensors one after another."""
    parts = [t.detach().reshape(-1).view(torch.uint8) for w in weights for t in w.tensors]
    return torch.cat(parts)


def from_row(row: Tensor, weights: Sequence[PackedWeight]) -> None:
    """Overwrite the tensors with what `to_row` made of others of the same kinds."""
    start = 0
    for weight in weights:
        for tensor in weight.tensors:
            num_bytes = tensor.numel() * tensor.element_size()
            # NOTE: a copy: bytes in the middle of a row may not be aligned for the dtype.
            part = row[start : start + num_bytes].clone().view(tensor.dtype)
            tensor.detach().copy_(part.view(tensor.shape))
            start += num_bytes
    assert start == len(row), f"{len(row)} bytes for weights of {start}"
