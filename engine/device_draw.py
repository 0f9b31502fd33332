"""Drawing tokens where the logits are: only the tokens are copied to the host, not [S, V] numbers.

The device's operator narrows the rows by top_k and top_p; the number of each row picks from what is
left, as in kernels.drawing, but in float32: devices have no float64 to speak of. So a token may
differ from the host's where a number falls between two by less than that precision.
"""

import torch
from torch import Tensor

from engine.request import Request
from kernels.drawing import DrawParams, exp_in_chunks, invert, scores_of
from kernels.ops import Ops


class DeviceDraw:
    """Draws as `kernels.drawing.draw` does, by ops that sample on their device."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __call__(self, logits: Tensor, params: DrawParams, numbers: Tensor) -> Tensor:
        """logits: [S, V] float32; numbers: [S] on the host -> [S]; all use top_k, or none."""
        scores = self._narrowed(scores_of(logits, params), params)
        numbers = numbers.float().to(logits.device)
        found = invert(exp_in_chunks(scores), numbers.unsqueeze(1))
        return found.clamp_(max=logits.shape[1] - 1)

    def _narrowed(self, scores: Tensor, params: DrawParams) -> Tensor:
        if params.top_k is None and params.top_p is None:
            return scores
        return self._ops.top_k_top_p(
            scores,
            None if params.top_k is None else params.top_k[:, 0].int(),
            None if params.top_p is None else params.top_p[:, 0],
        )


def device_draw_of(ops: Ops, device: torch.device) -> DeviceDraw | None:
    """For logits on `device`, if that is where the ops sample."""
    return DeviceDraw(ops) if ops.samples_on_device and device == ops.device else None


def can_draw(request: Request, ops: Ops) -> bool:
    """Whether nothing of a request but its token is made of its logits, and nothing masks them."""
    sampling = request.sampling
    return (
        ops.samples_on_device
        and sampling.top_k <= ops.max_top_k
        and not sampling.grammar
        and sampling.num_logprobs is None
        and not sampling.logit_bias
        and sampling.repetition_penalty == 1.0
        and sampling.presence_penalty == sampling.frequency_penalty == 0.0
        and request.num_output_tokens >= sampling.min_tokens
    )
