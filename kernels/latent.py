"""What a decode step of latent attention does before it attends, as a backend may offer it whole.

Letters as in kernels.mla; Q: q_lora_rank.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kernels.kv_cache import KVCache


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentWeights:
    """Packed weights of one layer, this rank's heads."""

    a_proj: Any
    """`Ops.linear` to [Q + R + P]: what queries and latents are made of."""
    q_b_proj: Any
    """`Ops.linear` of Q to [H * (Dn + P)]."""
    q_norm: Tensor
    """[Q]."""
    kv_norm: Tensor
    """[R]."""
    w_uk: Tensor
    """[H, Dn, R]."""
    eps: float
    """Of both norms."""


class LatentProlog(Protocol):
    """Projects, normalises, rotates, absorbs the keys' up-projection and writes the cache."""

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        latent_cache: KVCache,
        rope_cache: KVCache,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """-> q_latent [T, H, R], q_rope [T, H, P], and both caches, as written.

        x: [T, hidden_size]; the rest as in `Ops.kv_rmsnorm_rope`.
        """
        ...
