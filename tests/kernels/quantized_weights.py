"""Random quantised weights of every form that the kernels take."""

import torch

from kernels.quantized import QuantizedWeight

FORMS = {  # bits, group size, offsets, factors that float16 holds
    "a scale per output": (8, 1 << 20, False, False),
    "Q8_0": (8, 32, False, True),
    "Q4_1": (4, 32, True, True),
    "offsets of 8 bits": (8, 64, True, True),
    "AWQ": (4, 128, True, False),
    "small groups": (4, 8, False, True),
}
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def make_weight(form: str, num_outputs: int, num_inputs: int, seed: int = 0) -> QuantizedWeight:
    """Any value, and factors that bring outputs to order 1."""
    if form in HALVES:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5
        return QuantizedWeight.of_halves(values.to(HALVES[form]))
    num_bits, group_size, has_offset, is_half = FORMS[form]
    generator = torch.Generator().manual_seed(seed)
    group_size = min(group_size, num_inputs)
    low, high = (0, 16) if num_bits == 4 else (-128, 128)
    values = torch.randint(
        low, high, (num_outputs, num_inputs), dtype=torch.int8, generator=generator
    )
    shape = (num_outputs, -(-num_inputs // group_size))
    scale = (0.5 + torch.rand(shape, generator=generator)) / high / num_inputs**0.5
    offset = -high / 2 * scale if has_offset else None
    if is_half:
        scale = scale.half().float()
        offset = None if offset is None else offset.half().float()
    return QuantizedWeight(values, scale, offset, group_size, num_bits)
