"""From logits to tokens, batched.

Order: logit_bias; repetition, presence and frequency penalties; min_tokens; grammar; temperature;
min_p; top_k; top_p; draw. Log-probabilities are those of the model's own logits, before all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device_draw import DeviceDraw
from engine.draw import DrawParams, draw, uniforms, uses_top_k
from engine.grammar import TokenMasks
from engine.logprobs import TokenLogprobs, top_logprobs
from engine.penalties import Penalties
from engine.request import Request, SamplingParams

# Below this, dividing by the temperature overflows; the limit is the argmax anyway.
_MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One sampled token per row, and its log-probabilities where the request asked for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Samples the next token of each request; keeps what depends on who is in the batch alone."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device_draw: DeviceDraw | None = None,
    ) -> None:
        """device_draw: draws from logits that are on its device; None: all are on the host."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device_draw = device_draw
        self._batch: _Batch | None = None

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, requests: Sequence[Request], masks: TokenMasks | None = None
    ) -> SamplerOutput:
        """Sample the token after the last one of each request.

        logits: [R, V] float32, row i for requests[i]; not modified. masks: of the requests with a
        grammar. The random number is a pure function of the request's seed and the new token's
        index in token_ids.

        Raises: ValueError: the shape of logits is not [len(requests), vocab_size].
        """
        requests = list(requests)
        if logits.shape != (len(requests), self._vocab_size):
            raise ValueError(
                f"logits are {list(logits.shape)}, expected [{len(requests)}, {self._vocab_size}]"
            )
        if not requests:
            return SamplerOutput([], [])
        batch = self._batch
        if batch is None or batch.requests != requests or batch.device != logits.device:
            on_device = self._device_draw
            batch = self._batch = _Batch(
                requests,
                self._vocab_size,
                self._eos_token_ids,
                logits.device,
                batch,
                on_device if on_device is not None and on_device.suits(logits) else None,
            )
        token_ids = batch.choose(batch.adjust(logits, masks)).tolist()
        return SamplerOutput(token_ids, batch.logprobs(logits, token_ids))

    def forget(self) -> None:
        """Drop what is kept of the last batch, its requests included."""
        self._batch = None


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are drawn together; rows is None for all rows of the batch."""

    rows: Tensor | None
    params: DrawParams
    requests: list[Request]
    seeds: NDArray[np.uint64]


class _Batch:
    """Options of one make-up of requests, as tensors."""

    def __init__(
        self,
        requests: list[Request],
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        previous: "_Batch | None",
        device_draw: DeviceDraw | None,
    ) -> None:
        self.requests = requests
        self.device = device
        self._device_draw = device_draw
        self._vocab_size = vocab_size
        self.penalties: Penalties = Penalties(requests, previous.penalties if previous else None)
        self._bias = _bias(requests, vocab_size, device)
        self._banned = _banned(requests, vocab_size, eos_token_ids)
        drawn = [row for row, r in enumerate(requests) if not _is_greedy(r.sampling)]
        # Rows without top_k and top_p are drawn apart, to spare them the search for the largest;
        # and rows with top_k, since the device's operator takes it for all rows or none.
        kinds = [_kind(requests[row].sampling, vocab_size) for row in drawn]
        groups = [[r for r, k in zip(drawn, kinds, strict=True) if k == kind] for kind in range(3)]
        self._groups = [self._group(rows) for rows in groups if rows]
        self._logprob_rows = [
            row for row, r in enumerate(requests) if r.sampling.num_logprobs is not None
        ]

    def adjust(self, logits: Tensor, masks: TokenMasks | None) -> Tensor:
        """Logits with bias, penalties, bans and masks; the same tensor where there are none."""
        bans = [(row, ids) for row, ids in self._banned if _is_below_min_tokens(self.requests[row])]
        if self._bias is None and not self.penalties and not bans and masks is None:
            return logits
        if masks is not None and bans:
            bans = _possible(bans, masks)
        logits = logits.clone()
        if self._bias is not None:
            rows, ids, values = self._bias
            logits[rows, ids] += values
        if self.penalties:
            self.penalties.apply_(logits)
        if bans:
            repeated = [row for row, ids in bans for _ in ids]
            logits[repeated, [token_id for _, ids in bans for token_id in ids]] = float("-inf")
        if masks is not None:
            blocked = torch.from_numpy(~masks.allowed).to(self.device)
            logits[masks.rows] = logits[masks.rows].masked_fill_(blocked, float("-inf"))
        return logits

    def choose(self, logits: Tensor) -> Tensor:
        """A token per row. [R, V] float32 -> [R] int64."""
        if len(self._groups) == 1 and self._groups[0].rows is None:
            return self._draw(self._groups[0], logits)
        # One argmax of all rows costs less than gathering the greedy ones.
        token_ids = logits.argmax(dim=-1)
        for group in self._groups:
            token_ids[group.rows] = self._draw(group, logits[group.rows])
        return token_ids

    def logprobs(self, logits: Tensor, token_ids: list[int]) -> list[TokenLogprobs | None]:
        """Log-probabilities of the rows whose requests ask for them. logits: the model's own."""
        result: list[TokenLogprobs | None] = [None] * len(token_ids)
        rows = self._logprob_rows
        if not rows:
            return result
        wanted = [self.requests[row].sampling.num_logprobs or 0 for row in rows]
        found = top_logprobs(logits[rows], [token_ids[row] for row in rows], max(wanted))
        for row, k, entry in zip(rows, wanted, found, strict=True):
            result[row] = TokenLogprobs(entry.token_id, entry.logprob, entry.top[:k])
        return result

    def _group(self, rows: list[int]) -> _Group:
        requests = [self.requests[row] for row in rows]
        everything = len(rows) == len(self.requests)
        return _Group(
            None if everything else torch.tensor(rows, device=self.device),
            DrawParams.of(
                [r.sampling for r in requests],
                self._vocab_size,
                self.device,
                torch.float64 if self._device_draw is None else torch.float32,
            ),
            requests,
            np.array([r.sampling.seed % 2**64 for r in requests], np.uint64),
        )

    def _draw(self, group: _Group, logits: Tensor) -> Tensor:
        positions = np.array([request.num_tokens for request in group.requests], np.uint64)
        numbers = torch.from_numpy(uniforms(group.seeds, positions))
        if self._device_draw is not None:
            return self._device_draw(logits, group.params, numbers)
        return draw(logits, group.params, numbers.to(self.device))


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < _MIN_TEMPERATURE


def _kind(sampling: SamplingParams, vocab_size: int) -> int:
    """What narrows the row: 0 nothing, 1 top_p alone, 2 top_k."""
    return 2 if uses_top_k(sampling, vocab_size) else int(sampling.top_p < 1.0)


def _is_below_min_tokens(request: Request) -> bool:
    return request.num_output_tokens < request.sampling.min_tokens


def _bias(
    requests: list[Request], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(rows, token ids, values) of all biases; ids beyond the vocabulary have no logit to bias."""
    entries = [
        (row, token_id, value)
        for row, request in enumerate(requests)
        for token_id, value in request.sampling.logit_bias.items()
        if 0 <= token_id < vocab_size
    ]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    return (
        torch.tensor(rows, device=device),
        torch.tensor(ids, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def _possible(bans: list[tuple[int, list[int]]], masks: TokenMasks) -> list[tuple[int, list[int]]]:
    """The bans that leave a token: a grammar that can only end goes before min_tokens."""
    allowed = dict(zip(masks.rows, masks.allowed, strict=True))
    return [
        (row, ids)
        for row, ids in bans
        if row not in allowed or allowed[row].sum() > allowed[row][ids].sum()
    ]


def _banned(
    requests: list[Request], vocab_size: int, eos_token_ids: frozenset[int]
) -> list[tuple[int, list[int]]]:
    """(row, the tokens that would end the request) of all rows with min_tokens."""
    banned = []
    for row, request in enumerate(requests):
        sampling = request.sampling
        if _is_below_min_tokens(request):
            ends = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_token_ids)
            ids = sorted(token_id for token_id in ends if 0 <= token_id < vocab_size)
            banned.append((row, ids))
    return [(row, ids) for row, ids in banned if ids]
