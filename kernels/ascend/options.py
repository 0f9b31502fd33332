"""What may be chosen of how NPUs compute; imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NpuOptions:
    """Choices that change no token but by rounding."""

    quantize_activations: bool = False
    """int8 weights meet int8 activations (W8A8), rounded per token; else floats (W8A16)."""
    multi_stream: bool = False
    """Compiled graphs run the shared expert and the latent cache's write on a second stream."""
    fuse_collectives: bool = False
    """Products and the collectives beside them are one operator, where rows are scattered over tp.
    Their weights are then in plain order instead of FRACTAL_NZ.
    """
    mla_prolog: bool = True
    """Decode steps of latent attention start with one operator, for models of the widths that it
    takes. It needs a second copy of the projections to latents.
    """
    prefetch: bool = False
    """Bring the weights of the next product to the cache while attention runs."""


DEFAULT_OPTIONS = NpuOptions()
