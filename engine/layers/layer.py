"""What every layer that owns weights offers to the loader."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from engine.config import Quantization
from engine.split import Span
from kernels.quantized import QuantizedRows


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a checkpoint's tensor a weight is: `span` of its dim `dim`, all of the rest."""

    dim: int
    span: Span


class WeightedLayer(nn.Module):
    """A leaf with weights: filled in place by the loader, then packed once.

    __init__ --> engine.weights writes to the weights() --> pack() --> forward(), again and again
    """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names as in Hugging Face checkpoints, relative to the parent, and the tensors to fill."""
        raise NotImplementedError

    def shards(self) -> Mapping[str, Shard]:
        """The weights, by the names of `weights`, that are a part of the checkpoint's tensor."""
        return {}

    def elsewhere(self) -> Iterator[str]:
        """Names, as those of `weights`, that a checkpoint holds and other ranks load."""
        return iter(())

    def shares(self) -> "WeightedLayer | None":
        """The layer whose weight this one packs, once that one is filled; None: its own."""
        return None

    def pack(self, quantization: Quantization) -> None:
        """Bring the weights, all of them filled, into the form that the backend computes with.

        A layer that does not lose by it follows `quantization`.
        """

    def rounding(self, quantization: Quantization) -> Quantization:
        """How `pack` rounds: none, int8 or int4."""
        return "none"

    def quantizable(self) -> Collection[str]:
        """Names, as those of `weights`, that `pack_quantized` takes: matrices."""
        return ()

    def pack_quantized(self, weights: Mapping[str, QuantizedRows]) -> bool:
        """Instead of `pack`: all that is `quantizable`, the rest being filled.

        Rows are read while they are packed: the weight is never there as floats. Return whether
        their forms go together; if not, nothing happened.
        """
        raise NotImplementedError


def weighted_layers(model: nn.Module) -> list[tuple[str, WeightedLayer]]:
    """Every layer, in order, with what its names in checkpoints start with."""
    found = []
    for path, layer in model.named_modules():
        if isinstance(layer, WeightedLayer):
            parent = path.rpartition(".")[0]
            found.append((f"{parent}." if parent else "", layer))
    return found


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor to fill from a checkpoint of `model`, by its name there."""
    return {
        prefix + name: tensor
        for prefix, layer in weighted_layers(model)
        for name, tensor in layer.weights()
    }


@runtime_checkable
class WhenPacked(Protocol):
    """A module that makes something of the packed weights of several layers."""

    def when_packed(self) -> None:
        """Called once, after all layers of the model have been packed."""
        ...


def finish_packing(model: nn.Module) -> None:
    """Tell whoever waits for it that every layer of `model` is packed."""
    for module in model.modules():
        if isinstance(module, WhenPacked):
            module.when_packed()


def pack_weights(model: nn.Module, quantization: Quantization = "none") -> None:
    """Pack every layer of `model`, one at a time, so that only one layer exists in both forms."""
    for layer in model.modules():
        if isinstance(layer, WeightedLayer):
            layer.pack(quantization)
    finish_packing(model)
