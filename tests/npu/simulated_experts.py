"""What the NPU's operators for experts compute: fused in int8 on one rank, and over several.

The ranks are threads of this process. `Meeting` is their network; the operators find it by the name
of the communicator, as on the device. As in tests.npu.simulator each function checks what the pages
demand and poisons what they leave undefined.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.npu.simulation import demand as _demand
from tests.npu.simulation import kernel as _kernel
from tests.npu.simulator import dynamic_quant, swiglu

TIMEOUT_S = 60.0
_WORDS = 128  # of assist information a row


class Meeting:
    """Ranks that wait for each other and then know what all of them brought."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._brought: list[Any] = [None] * size

    def __call__(self, rank: int, value: Any) -> list[Any]:
        self._brought[rank] = value
        self._barrier.wait(TIMEOUT_S)
        found = list(self._brought)
        self._barrier.wait(TIMEOUT_S)
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadGroup:
    """Implements engine.collectives.Group for threads; those of `ranks` meet."""

    def __init__(self, meeting: Meeting, rank: int, size: int, communicator: str = "") -> None:
        self.rank, self.size, self.communicator = rank, size, communicator
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._meeting(self.rank, x.clone())).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._meeting(self.rank, x.clone()))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank]

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        brought = self._meeting(self.rank, x.clone().split(list(sent)))
        parts = [parts[self.rank] for parts in brought]
        assert [len(part) for part in parts] == list(received)
        return torch.cat(parts)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self._meeting(self.rank, x.clone())[source])


_exchanges: dict[str, tuple[Meeting, list[str]]] = {}
_rows_sent: Counter[str] = Counter()


class Network:
    """Groups of `size` ranks, and a communicator for their exchange while the context is open."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[str] = []
        """Of dispatch and combine, rank 0's."""
        self._meetings: list[Meeting] = []
        self._name = f"exchange of {size}"
        _exchanges[self._name] = (self.meeting(size), self.calls)

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        del _exchanges[self._name]
        del _rows_sent[self._name]

    @property
    def num_rows_sent(self) -> int:
        """Rows of all ranks that dispatch took, in all calls."""
        return _rows_sent[self._name]

    def meeting(self, size: int) -> Meeting:
        self._meetings.append(Meeting(size))
        return self._meetings[-1]

    def exchange(self, rank: int) -> ThreadGroup:
        return ThreadGroup(self._meetings[0], rank, self.size, self._name)

    def run(self, job: Callable[[int], Any]) -> list[Any]:
        """job(rank) on all ranks at once; the first error ends all."""

        def attempt(rank: int) -> Any:
            try:
                with torch.inference_mode():
                    return job(rank)
            except BaseException:
                for meeting in self._meetings:
                    meeting.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(attempt, rank) for rank in range(self.size)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


@_kernel("npu_grouped_matmul_swiglu_quant_v2")
def grouped_matmul_swiglu_quant(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    dequant_mode: int = 0,
    dequant_dtype: int = 6,
    quant_mode: int = 0,
    quant_dtype: int = 1,
    group_list_type: int = 0,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    _demand(len(weight) == len(weight_scale) == 1, "one weight, one scale")
    _demand(x.dtype == weight[0].dtype == torch.int8 and x.shape[1] < 65536, "A8W8")
    _demand(x_scale.dtype == weight_scale[0].dtype == torch.float32, "scales are float32")
    _demand(x_scale.shape == x.shape[:1] and x.is_contiguous(), "a scale for each row")
    num_groups, _, width = weight[0].shape
    _demand(weight_scale[0].shape == (num_groups, width) and width <= 10240, "N is up to 10240")
    _demand(x.shape[1] <= 1040, "sums of products are exact in float32")
    _demand((dequant_mode, dequant_dtype, quant_mode, quant_dtype) == (0, 6, 0, 1), "per token")
    _demand(group_list.dtype == torch.int64 and len(group_list) == num_groups, "groups")
    stops = group_list.cumsum(0) if group_list_type == 1 else group_list
    _demand(int(stops[-1]) <= len(x), "groups fit the rows")
    out = torch.full((len(x), width // 2), 77, dtype=torch.int8)
    scales = torch.full((len(x),), torch.nan)
    start = 0
    for group, stop in enumerate(stops.tolist()):
        part = x[start:stop].float() @ weight[0][group].float()  # exact up to 1,040 products
        part = part * x_scale[start:stop, None] * weight_scale[0][group]
        quantised: Any = dynamic_quant(swiglu(part))
        out[start:stop], scales[start:stop] = quantised
        start = stop
    return out, scales


class _Sent(NamedTuple):
    rows: Tensor
    active: Tensor
    scales: Tensor
    ids: Tensor
    agreed: tuple[object, ...]


def _check_exchange(
    ids: Tensor, tokens: list[int], size: int, num_experts: int, global_bs: int, tp: str
) -> None:
    """ids: those of rows that travel; others may be anything."""
    _demand(num_experts % size == 0 and 2 <= size <= 768, "experts are dealt out evenly")
    _demand(ids.dtype == torch.int32 and ids.shape[1] <= 16, "ids are int32, up to 16 a row")
    _demand(bool(((ids >= 0) & (ids < num_experts)).all()), "ids are experts")
    in_order = ids.sort(dim=1).values
    _demand(bool((in_order[:, 1:] != in_order[:, :-1]).all()), "a row's experts differ")
    _demand(min(tokens) >= 1, "every rank has a row")
    _demand(not tp, "no tp group outside of graphs of A2")
    if global_bs == 0:
        _demand(len(set(tokens)) == 1, "ranks have equally many rows, or global_bs says how many")
    else:
        _demand(global_bs % size == 0 and max(tokens) <= global_bs // size, "global_bs fits")


def _active(mask: Tensor | None, num_tokens: int) -> Tensor:
    """[num_tokens] bool: the rows that travel."""
    if mask is None:
        return torch.ones(num_tokens, dtype=torch.bool)
    _demand(mask.dtype == torch.bool and mask.shape == (num_tokens,), "a mask has a bool a row")
    _demand(bool((mask[1:] <= mask[:-1]).all()), "a mask is true before it is false")
    return mask.clone()


@_kernel("npu_moe_distribute_dispatch_v2")
def dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor | None = None,
    group_tp: str = "",
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    **unused: object,
) -> tuple[Tensor, ...]:
    _demand(all(not value or value == 1 for value in unused.values()), "nothing special")
    _demand(quant_mode in (0, 2) and expert_token_nums_type == 1, "plain")
    _demand(comm_alg in ("", "fullmesh"), "an algorithm that takes masks")
    num_tokens, top_k = expert_ids.shape
    scales = torch.full((num_tokens,), torch.nan)
    rows = x
    if quant_mode == 2:
        quantised: Any = dynamic_quant(x)
        rows, scales = quantised
    meeting, calls = _exchanges[group_ep]
    agreed = (ep_world_size, moe_expert_num, global_bs, quant_mode, x.shape[1], top_k, comm_alg)
    active = _active(x_active_mask, num_tokens)
    sent = meeting(ep_rank_id, _Sent(rows.clone(), active, scales, expert_ids.clone(), agreed))
    if ep_rank_id == 0:
        calls.append("dispatch in int8" if quant_mode else "dispatch")
    _rows_sent[group_ep] += sum(int(one.active.sum()) for one in sent) if ep_rank_id == 0 else 0
    _demand(len({one.agreed for one in sent}) == 1, "all ranks say the same")
    tokens = [len(one.ids) for one in sent]
    if len(set(tokens)) > 1:
        _demand(all(bool(one.active.all()) for one in sent), "no mask where ranks differ in rows")
    ids = expert_ids[active]
    _check_exchange(ids, tokens, ep_world_size, moe_expert_num, global_bs, group_tp)
    per_rank = moe_expert_num // ep_world_size
    capacity = (global_bs or num_tokens * ep_world_size) * min(per_rank, top_k)
    out = x.new_full((capacity, x.shape[1]), 77 if quant_mode else torch.nan, dtype=rows.dtype)
    out_scales = torch.full((capacity,), torch.nan)
    # Which rank, token and choice each row comes from: for combine alone.
    assist = torch.full((max(num_tokens * top_k, capacity * _WORDS),), -1, dtype=torch.int32)
    counts = torch.zeros(per_rank, dtype=torch.int64)
    received: list[int] = []
    row = 0
    for local in range(per_rank):
        for source, one in enumerate(sent):
            is_here = (one.ids == ep_rank_id * per_rank + local) & one.active[:, None]
            chosen = is_here.nonzero()
            tokens_of, stop = chosen[:, 0], row + len(chosen)
            out[row:stop], out_scales[row:stop] = one.rows[tokens_of], one.scales[tokens_of]
            origin = assist[row * _WORDS : stop * _WORDS].view(-1, _WORDS)
            origin[:, 0], origin[:, 1:3] = source, chosen
            received.append(stop)
            counts[local] += len(chosen)
            row = stop
    return (
        out,
        out_scales if quant_mode else torch.empty(0),
        assist,
        counts,
        torch.tensor(received, dtype=torch.int32),
        torch.empty(0, dtype=torch.int32),
        torch.empty(0),
    )


@_kernel("npu_moe_distribute_combine_v2")
def combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    group_tp: str = "",
    global_bs: int = 0,
    comm_alg: str = "",
    **unused: object,
) -> Tensor:
    _demand(all(value in (None, 0, 1, "") for value in unused.values()), "nothing special")
    _demand(expert_scales.dtype == torch.float32, "weights are float32")
    _demand(expert_scales.shape == expert_ids.shape, "a weight for each choice")
    meeting, calls = _exchanges[group_ep]
    if ep_rank_id == 0:
        calls.append("combine")
    active = _active(x_active_mask, len(expert_ids))
    total = int(ep_send_counts[-1])
    origins = assist_info_for_combine[: total * _WORDS].view(total, _WORDS)[:, :3].long()
    num_tokens, top_k = expert_ids.shape
    chosen = torch.full((num_tokens, top_k, expand_x.shape[1]), torch.nan, dtype=expand_x.dtype)
    for rows, theirs in meeting(ep_rank_id, (expand_x.clone(), origins)):
        own = (theirs[:, 0] == ep_rank_id).nonzero()[:, 0]
        chosen[theirs[own, 1], theirs[own, 2]] = rows[own]
    _demand(not bool(chosen[active].isnan().any()), "what was dispatched comes back")
    return (chosen.float() * expert_scales[..., None]).sum(1).to(expand_x.dtype)
