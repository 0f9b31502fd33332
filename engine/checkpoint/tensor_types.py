"""Which types tensors in a checkpoint's files may have. Needs no torch."""

from collections.abc import Iterable

from engine.checkpoint.quantization import Scheme
from engine.errors import UnsupportedModel

SAFETENSORS_FLOATS = frozenset({"F32", "F16", "BF16"})
SAFETENSORS_PACKED = frozenset({"I8", "I32", "I64", "F8_E4M3"})
"""In quantised checkpoints too."""
_HALVES = frozenset({"F16", "BF16"})

GGUF_KEPT = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Matrices of these may stay as they are; see engine.weights.gguf_blocks."""
GGUF_TYPES = ("F32", *GGUF_KEPT, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
GGUF_ROPE_DIVISORS = "rope_freqs.weight"
"""Stretches each frequency (Llama 3's scaling, worked out): no weight, but part of the rope."""

TensorType = tuple[str, str, int]
"""Name, type as the file's header says it, and number of dims."""


def check_safetensors_type(name: str, dtype: str, where: str, *, is_quantized: bool) -> None:
    """Raises: UnsupportedModel: a tensor of such a type is not read; names `where` it is."""
    supported = SAFETENSORS_FLOATS | (SAFETENSORS_PACKED if is_quantized else frozenset())
    if dtype not in supported:
        raise UnsupportedModel(
            f"{name} in {where} is {dtype}, supported: {', '.join(sorted(supported))}"
        )


def check_gguf_type(name: str, kind: str, where: str) -> None:
    """Raises: UnsupportedModel: a tensor of such a type is not read; names `where` it is."""
    if kind not in GGUF_TYPES and name != GGUF_ROPE_DIVISORS:
        raise UnsupportedModel(
            f"tensor {name} in {where} is {kind}, supported: {', '.join(GGUF_TYPES)}"
        )


def may_keep_safetensors(tensors: Iterable[TensorType], scheme: Scheme | None) -> bool:
    """Whether `quantization: native` may find something to keep; False is certain.

    What the order of inputs in GPTQ files forbids is seen when their numbers are read.
    """
    packed = {
        "awq": "qweight",
        "gptq": "qweight",
        "compressed-tensors": "weight_scale",
        "modelslim": "weight_scale",
    }
    method = "" if scheme is None else scheme.method
    for name, dtype, num_dims in tensors:
        kind = name.rpartition(".")[2]
        if kind == packed.get(method):
            return True
        if dtype in _HALVES and num_dims >= 2 and kind in ("weight", "gate_up_proj", "down_proj"):
            return True
    return False


def may_keep_gguf(tensors: Iterable[TensorType]) -> bool:
    """The same of a GGUF file."""
    return any(kind in GGUF_KEPT and num_dims >= 2 for _, kind, num_dims in tensors)
