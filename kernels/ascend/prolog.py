"""All that a decode step of latent attention does before it attends, in one operator.

    x -> c_q = norm(x W_DQ) -> [q_nope | q_rope] = c_q W_UQ_QR -> q_nope W_UK, rotate(q_rope)
    x -> [c | r] = x W_DKV_KR -> latent_cache = norm(c), rope_cache = rotate(r)

Weights of the first products are in FRACTAL_NZ, [in, out].

Source: torch_npu 2.13.0, _op_plugin_docs.py, npu_mla_prolog_v2; its golden function is in
Ascend/op-plugin, test/test_custom_ops/test_mla_prolog.py.
"""

import torch
from torch import Tensor

from kernels.ascend.linear import NpuLinear, to_nz
from kernels.ascend.mla import head_major, token_major
from kernels.kv_cache import KVCache, floats_of
from kernels.latent import LatentWeights

_HIDDEN_SIZE, _Q_LORA_RANK = 7168, 1536
_UK_WIDTHS = (128, 512)
_ROPE_WIDTH = 64
_NUM_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


class NpuLatentProlog:
    """Implements `kernels.latent.LatentProlog`."""

    def __init__(self, weights: LatentWeights) -> None:
        """weights: such as `fits` accepts."""
        a_proj, q_b_proj = weights.a_proj.plain(), weights.q_b_proj.plain()
        self._dq = to_nz(a_proj[:_Q_LORA_RANK].t())
        self._dkv_kr = to_nz(a_proj[_Q_LORA_RANK:].t())
        self._uq_qr = to_nz(q_b_proj.t())
        self._weights = weights

    @staticmethod
    def fits(weights: LatentWeights) -> bool:
        """Whether the operator takes the model: plain weights in the widths of DeepSeek-V3."""
        a_proj, q_b_proj = weights.a_proj, weights.q_b_proj
        if not (isinstance(a_proj, NpuLinear) and isinstance(q_b_proj, NpuLinear)):
            return False
        num_heads = weights.w_uk.shape[0]
        widths = (a_proj.in_features, a_proj.out_features, q_b_proj.in_features)
        wanted = (_HIDDEN_SIZE, _Q_LORA_RANK + _UK_WIDTHS[1] + _ROPE_WIDTH, _Q_LORA_RANK)
        return (
            a_proj.bias is q_b_proj.bias is None
            and widths == wanted
            and tuple(weights.w_uk.shape[1:]) == _UK_WIDTHS
            and num_heads in _NUM_HEADS
            and q_b_proj.out_features == num_heads * (_UK_WIDTHS[0] + _ROPE_WIDTH)
        )

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        latent_cache: KVCache,
        rope_cache: KVCache,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See LatentProlog. In a graph what it returns must be read, as of kv_rmsnorm_rope."""
        weights = self._weights
        q_latent, q_rope, latent_out, rope_out, _ = torch.ops.npu.npu_mla_prolog_v2(
            x.contiguous(),
            self._dq,
            self._uq_qr,
            weights.w_uk,
            self._dkv_kr,
            weights.q_norm,
            weights.kv_norm,
            sin,
            cos,
            slots,
            token_major(floats_of(latent_cache)),
            token_major(floats_of(rope_cache)),
            rmsnorm_epsilon_cq=weights.eps,
            rmsnorm_epsilon_ckv=weights.eps,
            cache_mode="PA_BSND",
        )
        return q_latent, q_rope, head_major(latent_out), head_major(rope_out)
