"""Drawing tokens: min_p, top_k and top_p narrow a row's distribution, one number picks from it.

The specification of `Ops.draw` and `Ops.argmax` in plain PyTorch. A row is treated by its own
values alone, its sums taken in one fixed order: it draws the same token in whatever batch it
stands.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 128
# To find a nucleus, this many of the largest scores are tried first, then _WIDENING times as many.
_NUM_CANDIDATES = 256
_WIDENING = 16
_NEG_INF = float("-inf")
_MARGINS = {torch.float64: 2.0**-40, torch.float32: 2.0**-22}


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Options of S rows as tensors on the logits' device; None where no row uses the option."""

    inverse_temperature: Tensor
    """[S, 1] float32."""
    log_min_p: Tensor | None
    """[S, 1] float32; -inf: off."""
    top_k: Tensor | None
    """[S, 1] int64; the vocabulary's size: off."""
    top_p: Tensor | None
    """[S, 1] float64, or what it is to be drawn with; 1: off."""
    max_top_k: int
    """Largest top_k of the rows that use it."""


def argmax(logits: Tensor) -> Tensor:
    """Where the largest of each row is. [S, V] -> [S] int64."""
    return logits.argmax(dim=-1)


def draw(logits: Tensor, params: DrawParams, numbers: Tensor) -> Tensor:
    """Draw a token per row. logits: [S, V] float32; numbers: [S] float64 in [0, 1) -> [S] int64.

    Temperature, then min_p, top_k, top_p, each on what the ones before it left. A score equal to
    the last one kept is kept as well.
    """
    scores = scores_of(logits, params)
    if params.top_k is not None:
        largest = scores.topk(params.max_top_k, dim=-1).values
        last = largest.gather(1, (params.top_k - 1).clamp_(max=params.max_top_k - 1))
        last.masked_fill_(params.top_k >= logits.shape[1], _NEG_INF)
        scores.masked_fill_(scores < last, _NEG_INF)
    weights = exp_in_chunks(scores)
    if params.top_p is not None:
        total = weights.sum(dim=-1).to(torch.float64).cumsum(dim=-1)[:, -1:]
        last = _last_of_nucleus(scores, params.top_p * total, _NUM_CANDIDATES)
        last.masked_fill_(params.top_p >= 1.0, _NEG_INF)
        weights = exp_in_chunks(scores.masked_fill_(scores < last, _NEG_INF))
    return invert(weights, numbers.unsqueeze(1)).clamp_(max=logits.shape[1] - 1)


def scores_of(logits: Tensor, params: DrawParams) -> Tensor:
    """Temperature and min_p: [S, V] float32, the highest of each row 0."""
    highest = logits.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    scores = (logits - highest).mul_(params.inverse_temperature)
    if params.log_min_p is not None:
        scores.masked_fill_(scores < params.log_min_p, _NEG_INF)
    return scores


def exp_in_chunks(scores: Tensor) -> Tensor:
    """exp, with zeros appended up to whole chunks. [S, V] -> [S, C, _CHUNK]."""
    num_rows, vocab_size = scores.shape
    num_chunks = -(-vocab_size // _CHUNK)
    weights = scores.new_zeros(num_rows, num_chunks * _CHUNK)
    torch.exp(scores, out=weights[:, :vocab_size])
    return weights.view(num_rows, num_chunks, _CHUNK)


def _last_of_nucleus(scores: Tensor, mass: Tensor, num_candidates: int) -> Tensor:
    """The score at which the sum of exp(score), largest first, reaches `mass`.

    scores: [S, V], mass: [S, 1] float64 -> [S, 1].
    """
    vocab_size = scores.shape[1]
    num_candidates = min(num_candidates, vocab_size)
    if num_candidates == vocab_size:
        largest = scores.sort(dim=-1, descending=True).values
    else:
        largest = scores.topk(num_candidates, dim=-1).values
    reached = largest.exp().to(torch.float64).cumsum(dim=-1)
    place = (reached < mass).sum(dim=-1, keepdim=True)
    last = largest.gather(1, place.clamp(max=num_candidates - 1))
    # Not reached although scores are left: these rows are flat and need more of the order.
    wide = ((place == num_candidates) & (last > _NEG_INF)).squeeze(1).nonzero().squeeze(1)
    if num_candidates < vocab_size and wide.numel() > 0:
        last[wide] = _last_of_nucleus(scores[wide], mass[wide], num_candidates * _WIDENING)
    return last


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """First index at which the cumulative weight exceeds number * total.

    In two levels, the chunk and then the place in it, so that only short rows are cumulated, and
    with the precision of `numbers`. weights: [S, C, _CHUNK], numbers: [S, 1] -> [S].
    """
    dtype = numbers.dtype
    sums = weights.sum(dim=-1).to(dtype)  # [S, C]
    reached = sums.cumsum(dim=-1)
    target = _below(numbers * reached[:, -1:], reached[:, -1:])
    chunk = (reached <= target).sum(dim=-1, keepdim=True).clamp_(max=sums.shape[1] - 1)  # [S, 1]
    rest = target - (reached.gather(1, chunk) - sums.gather(1, chunk))
    index = chunk.unsqueeze(2).expand(-1, -1, _CHUNK)
    inside = weights.gather(1, index).squeeze(1).to(dtype).cumsum(dim=-1)  # [S, _CHUNK]
    # NOTE: the chunk's float32 sum may exceed its last cumulative weight; a zero must not be drawn.
    rest = _below(rest, inside[:, -1:])
    place = (inside <= rest).sum(dim=-1)
    return chunk.squeeze(1) * _CHUNK + place


def _below(value: Tensor, bound: Tensor) -> Tensor:
    return torch.minimum(value, bound * (1.0 - _MARGINS[value.dtype]))
