"""What communication between NPUs needs of its surroundings, as numbers to be checked at start.

Source: Ascend/op-plugin, pages of npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2;
a buffer that is too small shows on the device as a memory fault, if at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20
DEFAULT_BUFFER_MIB = 200
"""HCCL_BUFFSIZE where it is not set."""

Product = Literal["A2", "A3"]
"""Atlas generation; its network, and with it the buffer's layout, differs."""

_PRODUCTS: dict[str, Product] = {"Ascend910B": "A2", "Ascend910_93": "A3"}
_A2_EP_SIZES = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256)
_A3_EP_SIZES = range(2, 769)
_MAX_EXPERTS = 1024
_MAX_K = 16
_MAX_TOKENS = {"A2": 256, "A3": 512}
_HIDDEN_SIZES = {"A2": (32, 7168), "A3": (1024, 8192)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertExchange:
    """Sizes of one expert-parallel group's dispatch and combine."""

    product: Product
    ep_size: int
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    max_tokens: int
    """Most tokens that one rank dispatches in a step."""
    num_shared_experts: int = 1
    """As dispatch is told, whose default is 1: ranks for them there are none, but the buffer has
    their place.
    """

    @property
    def num_local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.ep_size

    @property
    def num_rows(self) -> int:
        """Rows that dispatch returns on every rank, most of them undefined in a given step."""
        share = min(self.num_local_experts, self.num_experts_per_tok)
        return self.max_tokens * self.ep_size * share

    @property
    def buffer_bytes(self) -> int:
        """Least size of the communicator's buffer."""
        row_bytes = 2 * self.hidden_size
        if self.product == "A2":
            return 2 * (self.num_rows * row_bytes + 2 * MIB)
        dispatched = self.num_local_experts * self.max_tokens * self.ep_size
        combined = (self.num_experts_per_tok + self.num_shared_experts) * self.max_tokens
        padded_row = _aligned(_aligned(row_bytes, 32) + 64, 512)
        return 2 * (dispatched * padded_row + combined * _aligned(row_bytes, 512))

    @property
    def buffer_mib(self) -> int:
        """The same as HCCL_BUFFSIZE is written."""
        return -(-self.buffer_bytes // MIB)

    def check(self, buffer_mib: int | None = None) -> None:
        """Raise ValueError where dispatch and combine would not work, naming value and limit.

        buffer_mib: HCCL_BUFFSIZE or the group's own setting; None leaves it unchecked.
        """
        problems = [*self._problems()]
        if buffer_mib is not None and buffer_mib < self.buffer_mib:
            problems.append(
                f"HCCL_BUFFSIZE is {buffer_mib} MiB, dispatching {self.max_tokens} tokens to "
                f"{self.num_experts} experts over {self.ep_size} ranks needs {self.buffer_mib}"
            )
        if problems:
            raise ValueError("; ".join(problems))

    def _problems(self) -> list[str]:
        low, high = _HIDDEN_SIZES[self.product]
        max_tokens = _MAX_TOKENS[self.product]
        checks = [
            (
                self.product != "A2" or self.ep_size in _A2_EP_SIZES,
                f"ep_size is {self.ep_size}, A2 takes {_A2_EP_SIZES}",
            ),
            (
                self.product != "A3" or self.ep_size in _A3_EP_SIZES,
                f"ep_size is {self.ep_size}, A3 takes {_A3_EP_SIZES[0]} to {_A3_EP_SIZES[-1]}",
            ),
            (
                self.num_experts % self.ep_size == 0 and self.num_experts <= _MAX_EXPERTS,
                f"num_experts is {self.num_experts}, must be a multiple of ep_size {self.ep_size} "
                f"up to {_MAX_EXPERTS}",
            ),
            (
                1 <= self.num_experts_per_tok <= _MAX_K,
                f"num_experts_per_tok is {self.num_experts_per_tok}, the limit is {_MAX_K}",
            ),
            (
                1 <= self.max_tokens <= max_tokens,
                f"a rank dispatches {self.max_tokens} tokens, {self.product} takes 1 to "
                f"{max_tokens}",
            ),
            (
                low <= self.hidden_size <= high and self.hidden_size % 32 == 0,
                f"hidden_size is {self.hidden_size}, {self.product} takes multiples of 32 from "
                f"{low} to {high}",
            ),
        ]
        return [problem for is_fine, problem in checks if not is_fine]


def product_of(device_name: str) -> Product | None:
    """The generation of a device that torch_npu calls so; None: one without these operators."""
    for start, product in _PRODUCTS.items():
        if device_name.startswith(start):
            return product
    return None


def buffer_mib_of(environment: Mapping[str, str]) -> int:
    """HCCL_BUFFSIZE, or what HCCL takes without it. Raises: ValueError: it is not a number."""
    text = environment.get("HCCL_BUFFSIZE", str(DEFAULT_BUFFER_MIB))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"HCCL_BUFFSIZE is {text!r}, must be a number of MiB, at least 1")
    return int(text)


def _aligned(value: int, to: int) -> int:
    return -(-value // to) * to
