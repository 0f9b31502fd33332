"""Engines of several ranks: every rank has a Sender or a Receiver of its own."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from kvtransfer.connector import BlockCopy, Transfer
from kvtransfer.layout import KVLayout
from kvtransfer.link import RequestKey
from kvtransfer.registration import KVMemory
from protos import worker_pb2
from tests.kvtransfer.harness import CONFIG, ReaderThread, Writer


def held_heads(layout: KVLayout) -> list[int]:
    """Which model heads a rank holds, by listing slots: independent of the planner."""
    if layout.kv_lora_rank:
        return [0]
    total, size = layout.num_model_heads, layout.tp_size
    num_slots = max(total, size)
    per_rank = num_slots // size
    slots = range(layout.tp_rank * per_rank, (layout.tp_rank + 1) * per_rank)
    return [slot * total // num_slots for slot in slots]


K = ("request", 0)
SIZES = (1, 2, 4, 8)
MODELS = {
    "eight heads": KVLayout(
        dtype="float32", num_layers=2, num_kv_heads=8, head_dim=4, block_size=4
    ),
    "two heads": KVLayout(dtype="float32", num_layers=2, num_kv_heads=2, head_dim=4, block_size=4),
    "mla": KVLayout(
        dtype="bfloat16",
        num_layers=2,
        num_kv_heads=1,
        head_dim=4,
        block_size=4,
        kv_lora_rank=6,
        rope_dim=2,
    ),
    "int8": KVLayout(
        dtype="int8",
        num_layers=2,
        num_kv_heads=4,
        head_dim=8,
        block_size=4,
        scale_dtype="float32",
    ),
}


def model_values(layout: KVLayout, num_tokens: int) -> list[list[torch.Tensor]]:
    """Per part and layer [heads of the model, tokens, width], different everywhere."""
    generator = torch.Generator().manual_seed(7)
    return [
        [
            torch.randint(
                -128, 128, (layout.num_model_heads, num_tokens, part.width), generator=generator
            )
            for _ in range(layout.num_layers)
        ]
        for part in layout.parts
    ]


def fill(memory: KVMemory, blocks: Sequence[int], values: list[list[torch.Tensor]]) -> None:
    """Put the tokens of a prompt into its blocks, as the rank would have computed them."""
    layout = memory.layout
    for part, layers in zip(memory.caches, values, strict=True):
        for cache, value in zip(part, layers, strict=True):
            for token in range(value.shape[1]):
                index, slot = divmod(token, layout.block_size)
                if index < len(blocks):
                    cache[blocks[index], :, slot] = value[held_heads(layout), token].to(cache.dtype)


class Engine:
    """The readers of all ranks of one decoder, in this process."""

    def __init__(self, layout: KVLayout, tp_size: int):
        ranks = [layout.for_rank(rank, tp_size) for rank in range(tp_size)]
        self.readers = [ReaderThread(CONFIG, layout=rank) for rank in ranks]
        self.block_size = layout.block_size

    def expect(
        self, key: RequestKey, blocks: Sequence[int], first_block: int = 0, num_tokens: int = 0
    ) -> worker_pb2.KVTarget:
        for reader in self.readers:
            reader.receiver.expect(key, blocks, first_block=first_block, num_tokens=num_tokens)
        target = self.readers[0].target(blocks)
        target.rank_addresses.extend(reader.address for reader in self.readers)
        target.block_size = self.block_size
        target.first_block = first_block
        target.num_tokens = num_tokens
        return target

    def close(self) -> None:
        for reader in self.readers:
            reader.close()


def writers_of(layout: KVLayout, tp_size: int) -> list[Writer]:
    return [Writer(CONFIG, layout=layout.for_rank(rank, tp_size)) for rank in range(tp_size)]


def begin_all(
    writers: Sequence[Writer], key: RequestKey, target: worker_pb2.KVTarget
) -> list[Transfer]:
    return [writer.begin(key, target) for writer in writers]


def push_range(transfer: Transfer, writer: Writer, blocks: Sequence[int]) -> None:
    copies = [BlockCopy(blocks[index], index) for index in transfer.block_indices]
    for layer_idx in range(writer.memory.layout.num_layers):
        for start in range(0, len(copies), 2):
            transfer.push(layer_idx, copies[start : start + 2])


@contextmanager
def engines(
    source: KVLayout, source_size: int, target: KVLayout, target_size: int
) -> Iterator[tuple[list[Writer], Engine]]:
    with ExitStack() as stack:
        engine = Engine(target, target_size)
        stack.callback(engine.close)
        writers = writers_of(source, source_size)
        for writer in writers:
            stack.callback(writer.close)
        yield writers, engine
