"""Log-probabilities of chosen tokens and of the most likely ones, from the model's own logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability, and the most likely tokens at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token_id, logprob), most likely first; as many as were asked for."""


def top_logprobs(logits: Tensor, token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Log-softmax of each row at its token and at its k largest entries.

    logits: [R, V] float32, before temperature and penalties; token_ids: one per row. Serves sampled
    and prompt tokens alike: for the latter, row i holds the logits at prompt token i and
    token_ids[i] is prompt token i + 1.
    """
    if not token_ids:
        return []
    norm = logits.logsumexp(dim=-1, keepdim=True)
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(1)
    chosen_logprobs = (logits.gather(1, chosen) - norm).squeeze(1).tolist()
    values, ids = logits.topk(min(k, logits.shape[1]), dim=-1)
    top = zip(ids.tolist(), (values - norm).tolist(), strict=True)
    return [
        TokenLogprobs(token_id, logprob, tuple(zip(row_ids, row_logprobs, strict=True)))
        for token_id, logprob, (row_ids, row_logprobs) in zip(
            token_ids, chosen_logprobs, top, strict=True
        )
    ]
