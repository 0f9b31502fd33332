"""What every layer that owns weights offers to the loader."""

from collections.abc import Iterator

from torch import Tensor, nn

from engine.config import Quantization


class WeightedLayer(nn.Module):
    """A leaf with weights: filled in place by the loader, then packed once.

    __init__ --> engine.weights writes to the weights() --> pack() --> forward(), again and again
    """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names as in Hugging Face checkpoints, relative to the parent, and the tensors to fill."""
        raise NotImplementedError

    def pack(self, quantization: Quantization) -> None:
        """Bring the weights, all of them filled, into the form that the backend computes with.

        A layer that does not lose by it follows `quantization`.
        """


def weights_by_layer(model: nn.Module) -> list[tuple[WeightedLayer, dict[str, Tensor]]]:
    """Every layer, in order, with the tensors to fill, by their full names in checkpoints."""
    found = []
    for path, layer in model.named_modules():
        if isinstance(layer, WeightedLayer):
            parent = path.rpartition(".")[0]
            prefix = f"{parent}." if parent else ""
            found.append((layer, {prefix + name: tensor for name, tensor in layer.weights()}))
    return found


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a checkpoint of `model` must hold, by its name there."""
    return {
        name: tensor for _, weights in weights_by_layer(model) for name, tensor in weights.items()
    }


def pack_weights(model: nn.Module, quantization: Quantization = "none") -> None:
    """Pack every layer of `model`, one at a time, so that only one layer exists in both forms."""
    for layer in model.modules():
        if isinstance(layer, WeightedLayer):
            layer.pack(quantization)
