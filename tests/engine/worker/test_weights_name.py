"""The name of KV by the weights that computed it."""

import pytest

from engine.config import Quantization
from engine.worker.weights_name import weights_name
from kernels.cpu.options import ActivationBits, CpuOptions
from kernels.ops import Ops, select_ops

NAMES_BEFORE_ACTIVATIONS_WERE_ROUNDED = {"auto", "native", "int8", "int4"}


def cpu(bits: ActivationBits) -> Ops:
    return select_ops("cpu", cpu=CpuOptions(activation_bits=bits))


@pytest.mark.parametrize(
    ("quantization", "bits", "name"),
    [
        ("none", 16, "none"),
        ("none", 8, "none"),
        ("int8", 16, "int8, activations of 16"),
        ("int8", 8, "int8, activations of 16"),
        ("int4", 16, "int4, activations of 16"),
        ("int4", 8, "int4, activations of 8"),
        ("native", 16, "native, activations of 16"),
        ("native", 8, "native, activations of 8 and 16"),
        ("auto", 16, "native, activations of 16"),
        ("auto", 8, "native, activations of 8 and 16"),
    ],
)
def test_cpu_kernels_are_named_by_what_they_round_activations_to(
    quantization: Quantization, bits: ActivationBits, name: str
) -> None:
    assert weights_name(quantization, cpu(bits)) == name
    assert name not in NAMES_BEFORE_ACTIVATIONS_WERE_ROUNDED


@pytest.mark.parametrize(
    ("quantization", "name"),
    [("none", "none"), ("auto", "none"), ("int8", "int8"), ("int4", "int4"), ("native", "native")],
)
def test_the_reference_multiplies_in_floats_whatever_cpu_kernels_are_told(
    quantization: Quantization, name: str
) -> None:
    options = CpuOptions(activation_bits=8)
    assert weights_name(quantization, select_ops("reference", cpu=options)) == name


@pytest.mark.parametrize("quantization", ["int8", "int4", "native", "auto"])
def test_floats_and_rounded_activations_never_share_a_name(quantization: Quantization) -> None:
    ways = [cpu(16), cpu(8), select_ops("reference")]
    names = [weights_name(quantization, ops) for ops in ways]
    assert len(set(names)) == (2 if quantization == "int8" else 3)
