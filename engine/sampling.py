"""From logits to tokens, batched.

Order: logit_bias; repetition, presence and frequency penalties; min_tokens; grammar; temperature;
min_p; top_k; top_p; draw. Log-probabilities are those of the model's own logits, before all of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device_draw import device_draw_of
from engine.draw import draw_params, uniforms, uses_top_k
from engine.grammar import TokenMasks
from engine.logprobs import TokenLogprobs, top_logprobs
from engine.penalties import Penalties
from engine.request import Request, SamplingParams
from kernels.drawing import DrawParams
from kernels.ops import Ops

_Bans = list[tuple[int, list[int]]]

# Below this, dividing by the temperature overflows; the limit is the argmax anyway.
_MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One sampled token per row, and its log-probabilities where the request asked for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Samples the next token of each request; keeps what depends on who is in the batch alone."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], ops: Ops) -> None:
        """ops: draw the tokens, where they can from logits that are on their device."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._ops = ops
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
        positions = [request.num_tokens for request in requests]
        if logits.shape != (len(requests), self._vocab_size):
            raise ValueError(
                f"logits are {list(logits.shape)}, expected [{len(requests)}, {self._vocab_size}]"
            )
        if not requests:
            return SamplerOutput([], [])
        draws = self.prepare(requests, positions, logits.device)
        token_ids = draws.choose(logits, masks).tolist()
        return SamplerOutput(token_ids, draws.logprobs(logits, token_ids))

    def prepare(
        self, requests: Sequence[Request], positions: Sequence[int], device: torch.device
    ) -> "Draws":
        """What can be done before there are logits, which will be on `device`.

        positions: by request, the index in token_ids of the token that is to be sampled.
        """
        batch = self._batch
        if batch is None or batch.requests != requests or batch.device != device:
            batch = self._batch = _Batch(
                list(requests), self._vocab_size, self._eos_token_ids, device, batch, self._ops
            )
        return Draws(batch, positions)

    def forget(self) -> None:
        """Drop what is kept of the last batch, its requests included."""
        self._batch = None


class Draws:
    """One token for each request, at positions that are known, from logits that come later."""

    def __init__(self, batch: "_Batch", positions: Sequence[int]) -> None:
        """See `Sampler.prepare`."""
        self._batch = batch
        self._bans = batch.bans(positions)
        self._numbers = batch.numbers(positions)

    @property
    def wants_logprobs(self) -> bool:
        """Whether any request asks for log-probabilities."""
        return self._batch.wants_logprobs

    def upload(self, to_device: Callable[[Tensor], Tensor]) -> None:
        """Bring to the device what it draws with, so that `choose` need not wait for a copy."""
        if self._batch.draws_on_device:
            self._numbers = [to_device(numbers.float()) for numbers in self._numbers]

    def choose(self, logits: Tensor, masks: TokenMasks | None = None) -> Tensor:
        """[R, V] float32, not modified -> the tokens, [R] int64, on the device of logits."""
        return self._batch.choose(self._batch.adjust(logits, self._bans, masks), self._numbers)

    def logprobs(self, logits: Tensor, token_ids: list[int]) -> list[TokenLogprobs | None]:
        """Log-probabilities of the rows whose requests ask for them. logits: the model's own."""
        return self._batch.logprobs(logits, token_ids)


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are drawn together; rows is None for all rows of the batch."""

    rows: Tensor | None
    params: DrawParams
    places: list[int]
    """The same rows."""
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
        ops: Ops,
    ) -> None:
        self.requests = requests
        self.device = device
        self._ops = ops
        self._device_draw = device_draw_of(ops, device)
        self._vocab_size = vocab_size
        self.penalties: Penalties = Penalties(requests, previous.penalties if previous else None)
        self._bias = _bias(requests, vocab_size, device)
        self._banned = _banned(requests, vocab_size, eos_token_ids)
        drawn = [row for row, r in enumerate(requests) if not _is_greedy(r.sampling)]
        # The device's operator takes top_k for all rows or none, and rows without top_k and top_p
        # are spared its search for the largest.
        kinds = [
            _kind(requests[row].sampling, vocab_size) if self.draws_on_device else 0
            for row in drawn
        ]
        groups = [[r for r, k in zip(drawn, kinds, strict=True) if k == kind] for kind in range(3)]
        self._groups = [self._group(rows) for rows in groups if rows]
        self._logprob_rows = [
            row for row, r in enumerate(requests) if r.sampling.num_logprobs is not None
        ]

    @property
    def wants_logprobs(self) -> bool:
        """Whether any request asks for log-probabilities."""
        return bool(self._logprob_rows)

    @property
    def draws_on_device(self) -> bool:
        """Whether the device's operators draw the tokens."""
        return self._device_draw is not None

    def bans(self, positions: Sequence[int]) -> _Bans:
        """(row, tokens it must not get) at these positions: what would end it too early."""
        return [
            (row, ids)
            for row, ids in self._banned
            if _is_too_early(self.requests[row], positions[row])
        ]

    def numbers(self, positions: Sequence[int]) -> list[Tensor]:
        """A random number for each row of each group, on the host: float64."""
        at = np.array(positions, np.uint64)
        return [torch.from_numpy(uniforms(g.seeds, at[g.places])) for g in self._groups]

    def adjust(self, logits: Tensor, bans: _Bans, masks: TokenMasks | None) -> Tensor:
        """Logits with bias, penalties, bans and masks; the same tensor where there are none."""
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

    def choose(self, logits: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        """A token per row. [R, V] float32 -> [R] int64. numbers: see there."""
        if len(self._groups) == 1 and self._groups[0].rows is None:
            return self._draw(self._groups[0], logits, numbers[0])
        # One argmax of all rows costs less than gathering the greedy ones.
        token_ids = self._ops.argmax(logits)
        for group, group_numbers in zip(self._groups, numbers, strict=True):
            token_ids[group.rows] = self._draw(group, logits[group.rows], group_numbers)
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
            draw_params(
                [r.sampling for r in requests],
                self._vocab_size,
                self.device,
                torch.float64 if self._device_draw is None else torch.float32,
            ),
            rows,
            np.array([r.sampling.seed % 2**64 for r in requests], np.uint64),
        )

    def _draw(self, group: _Group, logits: Tensor, numbers: Tensor) -> Tensor:
        if self._device_draw is not None:
            return self._device_draw(logits, group.params, numbers)
        return self._ops.draw(logits, group.params, numbers.to(self.device))


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < _MIN_TEMPERATURE


def _kind(sampling: SamplingParams, vocab_size: int) -> int:
    """What narrows the row: 0 nothing, 1 top_p alone, 2 top_k."""
    return 2 if uses_top_k(sampling, vocab_size) else int(sampling.top_p < 1.0)


def _is_too_early(request: Request, position: int) -> bool:
    return position - request.num_prompt_tokens < request.sampling.min_tokens


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


def _possible(bans: _Bans, masks: TokenMasks) -> _Bans:
    """The bans that leave a token: a grammar that can only end goes before min_tokens."""
    allowed = dict(zip(masks.rows, masks.allowed, strict=True))
    return [
        (row, ids)
        for row, ids in bans
        if row not in allowed or allowed[row].sum() > allowed[row][ids].sum()
    ]


def _banned(requests: list[Request], vocab_size: int, eos_token_ids: frozenset[int]) -> _Bans:
    """(row, the tokens that would end the request) of all rows with min_tokens."""
    banned = []
    for row, request in enumerate(requests):
        sampling = request.sampling
        if _is_too_early(request, request.num_tokens):
            ends = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_token_ids)
            ids = sorted(token_id for token_id in ends if 0 <= token_id < vocab_size)
            banned.append((row, ids))
    return [(row, ids) for row, ids in banned if ids]
