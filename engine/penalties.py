"""Repetition, presence and frequency penalties, from a sparse history of each request's tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.request import Request


class _History:
    """The distinct tokens of one request, and how often each occurs in its output."""

    def __init__(self, request: Request) -> None:
        # Only the repetition penalty looks at the prompt.
        prompt = request.token_ids[: request.num_prompt_tokens]
        distinct = set(prompt) if request.sampling.repetition_penalty != 1.0 else set()
        self.request = request
        self._num_seen = request.num_prompt_tokens
        self._places = {token_id: place for place, token_id in enumerate(distinct)}
        self._token_ids = np.fromiter(distinct, np.int64, len(distinct))
        self._counts = np.zeros(len(distinct), np.float32)

    def catch_up(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(token ids, their counts in the output); views, valid until the next call."""
        for token_id in self.request.token_ids[self._num_seen :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._token_ids):
                self._grow()
            self._token_ids[place] = token_id
            self._counts[place] += 1
        self._num_seen = self.request.num_tokens
        num_distinct = len(self._places)
        return self._token_ids[:num_distinct], self._counts[:num_distinct]

    def _grow(self) -> None:
        more = max(64, len(self._token_ids))
        self._token_ids = np.concatenate([self._token_ids, np.zeros(more, np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])


class Penalties:
    """The penalised rows of one batch; a request that stays keeps its history."""

    def __init__(self, requests: Sequence[Request], previous: "Penalties | None") -> None:
        known = {id(h.request): h for h in previous.histories} if previous else {}
        rows = [row for row, request in enumerate(requests) if is_penalised(request)]
        # NOTE: `known` keeps its requests alive, so an id names the same request as before.
        self.histories: list[_History] = [
            known.get(id(requests[row])) or _History(requests[row]) for row in rows
        ]
        sampling = [requests[row].sampling for row in rows]
        self._rows = np.array(rows, np.int64)
        self._repetition = np.array([s.repetition_penalty for s in sampling], np.float32)
        self._presence = np.array([s.presence_penalty for s in sampling], np.float32)
        self._frequency = np.array([s.frequency_penalty for s in sampling], np.float32)

    def __bool__(self) -> bool:
        return bool(self.histories)

    def apply_(self, logits: Tensor) -> None:
        """Penalise the rows in place. logits: [R, V] float32.

        Repetition divides positive logits and multiplies negative ones, for tokens of prompt and
        output; presence and frequency subtract, for tokens of the output only.
        """
        histories = [history.catch_up() for history in self.histories]
        lengths = [len(token_ids) for token_ids, _ in histories]
        counts = np.concatenate([counts for _, counts in histories])
        subtracted = np.repeat(self._presence, lengths) * (counts > 0)
        subtracted += np.repeat(self._frequency, lengths) * counts
        device = logits.device
        rows = torch.from_numpy(np.repeat(self._rows, lengths)).to(device)
        ids = torch.from_numpy(np.concatenate([token_ids for token_ids, _ in histories])).to(device)
        factor = torch.from_numpy(np.repeat(self._repetition, lengths)).to(device)
        values = logits[rows, ids]
        values = torch.where(values > 0, values / factor, values * factor)
        logits[rows, ids] = values - torch.from_numpy(subtracted).to(device)


def is_penalised(request: Request) -> bool:
    """Whether the tokens that a request has change the logits of its next one."""
    sampling = request.sampling
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )
