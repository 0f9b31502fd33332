"""Architectures by their Hugging Face name."""

from typing import Protocol

from torch import Tensor

from engine.architectures import Architecture
from engine.batch import KVBatch
from engine.config import ModelConfig
from engine.layers.attention import OnLayer
from engine.models.decoder import DecoderForCausalLM
from engine.models.deepseek_v3 import deepseek_layer
from engine.models.layer import BuildLayer
from engine.models.llama import llama_layer
from engine.models.mixtral import mixtral_layer
from engine.models.qwen2 import qwen2_layer
from engine.models.qwen3 import qwen3_layer
from engine.models.qwen3_moe import qwen3_moe_layer
from engine.parallel import Parallel
from kernels.ops import Ops

MODELS: dict[Architecture, BuildLayer] = {
    "DeepseekV2ForCausalLM": deepseek_layer,
    "DeepseekV3ForCausalLM": deepseek_layer,
    "LlamaForCausalLM": llama_layer,
    "MistralForCausalLM": llama_layer,
    "MixtralForCausalLM": mixtral_layer,
    "Qwen2ForCausalLM": qwen2_layer,
    "Qwen3ForCausalLM": qwen3_layer,
    "Qwen3MoeForCausalLM": qwen3_moe_layer,
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


def build_model(
    config: ModelConfig, ops: Ops, parallel: Parallel | None = None
) -> DecoderForCausalLM:
    """This rank's part of the model with uninitialised weights; see engine.weights.load_weights.

    Raises: ValueError: a size of the model cannot be split over the ranks.
    """
    parallel = parallel or Parallel()
    if config.moe is None and parallel.config.ep_size > 1:
        raise ValueError(f"ep_size is {parallel.config.ep_size}, the model has no experts")
    return DecoderForCausalLM(config, ops, MODELS[config.architecture], parallel)
