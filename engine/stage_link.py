"""What the stages of a pipeline hand to each other, point to point between ranks of the same place.

    stage 0 --rows--> stage 1 --rows--> ... last
       ^                                 |
       +---- final states of some rows --+

A row is the residual stream, as it is between two blocks: with scattered rows, a rank sends its
own. Nobody waits for a stage after its own: what was sent is kept until it is fetched. The leader
bounds how many steps are under way, and so what is kept.
"""

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.collectives import ProcessGroup
from engine.turns import Pending


@dataclass(frozen=True, slots=True)
class Arriving:
    """States on their way to the first stage."""

    _out: Tensor
    _pending: Pending

    def wait(self) -> Tensor:
        """[R, hidden_size]. Raises: RuntimeError: the last stage is gone or late."""
        self._pending.wait()
        return self._out


class StageLink:
    """One rank's ends; used by the thread that runs the model."""

    def __init__(self, group: ProcessGroup, back: ProcessGroup, max_steps: int) -> None:
        """back: the same ranks once more; max_steps: most that are under way at once."""
        # NOTE: apart, since a device carries out one group's operations one after the other, and a
        # step's way back must not hold up the next one's rows.
        self._group, self._back = group, back
        self._max_steps = max_steps
        self._sent: deque[tuple[Pending, Tensor]] = deque()
        self.waited_s = 0.0
        """For the stage before, since the start."""

    def receive(
        self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The next rows of the stage before: [num_rows, width].

        Raises: RuntimeError: it is gone or late.
        """
        start_s = time.perf_counter()
        rows = torch.empty(num_rows, width, dtype=dtype, device=device)
        self._group.start_receive(rows, self._group.rank - 1).wait()
        self.waited_s += time.perf_counter() - start_s
        return rows

    def send(self, rows: Tensor) -> None:
        """Hand rows to the stage after."""
        self._send(self._group, rows, self._group.rank + 1)

    def send_back(self, states: Tensor) -> None:
        """Hand final states to the first stage, from the last."""
        self._send(self._back, states, 0)

    def expect(self, num_rows: int, like: Tensor) -> Arriving:
        """What `send_back` sends next, in the first stage; like: a tensor of its width."""
        out = like.new_empty(num_rows, like.shape[-1])
        return Arriving(out, self._back.start_receive(out, self._back.size - 1))

    def _send(self, group: ProcessGroup, rows: Tensor, target: int) -> None:
        rows = rows.contiguous()
        self._sent.append((group.start_send(rows, target), rows))
        while len(self._sent) > self._max_steps:
            # NOTE: of a step that is over by now, so this does not block.
            pending, _ = self._sent.popleft()
            pending.wait()
