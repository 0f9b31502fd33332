"""Architectures by their Hugging Face name."""

from typing import Protocol

from torch import Tensor

from engine.batch import KVBatch
from engine.config import ModelConfig
from engine.errors import UnsupportedModel
from engine.layers.attention import OnLayer
from engine.models.llama import LlamaForCausalLM
from kernels.ops import Ops

MODELS = {
    "LlamaForCausalLM": LlamaForCausalLM,
}


class CausalLM(Protocol):
    """What the runner needs of a model."""

    @property
    def config(self) -> ModelConfig:
        """What it was built from."""
        ...

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVBatch,
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        """input_ids, positions: [T] -> hidden [T, hidden_size]; writes this step's KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden_size] -> [R, vocab_size]."""
        ...


def build_model(config: ModelConfig, ops: Ops) -> LlamaForCausalLM:
    """The model with uninitialised weights; see engine.weights.load_weights.

    Raises: UnsupportedModel: the architecture is not built here.
    """
    if config.architecture not in MODELS:
        supported = ", ".join(sorted(MODELS))
        raise UnsupportedModel(f"architecture is {config.architecture}, supported: {supported}")
    return MODELS[config.architecture](config, ops)
