"""KV between engines of every two numbers of ranks, each rank a process: the bytes that the target
would hold if it had computed them.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.engine.ranks import Ranks
from tests.engine.tiny import tiny_hf
from tests.engine.tiny_families import tiny_deepseek
from tests.integration.kv_rank_jobs import (
    Tokens,
    receive_computed,
    receive_random,
    send_computed,
    send_random,
)
from tests.kvtransfer.sharded import MODELS, SIZES, held_heads

pytestmark = pytest.mark.multiprocess

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    # Two KV heads: four and eight ranks hold them twice and four times.
    "replicated": partial(tiny_hf, LlamaForCausalLM, LlamaConfig, num_attention_heads=8),
    "eight heads": partial(
        tiny_hf, LlamaForCausalLM, LlamaConfig, num_attention_heads=8, num_key_value_heads=8
    ),
    "mla": partial(
        tiny_deepseek,
        "v3",
        num_attention_heads=8,
        num_key_value_heads=8,
        moe_intermediate_size=24,
    ),
}
LAYOUTS = {
    "replicated": MODELS["two heads"],
    "eight heads": MODELS["eight heads"],
    "mla": MODELS["mla"],
}


class Pairs:
    """Ranks of writers and of readers, started once, and models on disk."""

    def __init__(self, max_writers: int, max_readers: int, folder: Path) -> None:
        self._stack = ExitStack()
        self.writers = self._stack.enter_context(Ranks(max_writers))
        self.readers = self._stack.enter_context(Ranks(max_readers))
        self.pool = self._stack.enter_context(ThreadPoolExecutor(1))
        self._folder = folder

    def model(self, family: str) -> Path:
        path = self._folder / family
        if not path.exists():
            FAMILIES[family]().save_pretrained(path)
        return path

    def check_random(self, name: str, source: int, target: int, transport: str) -> None:
        with tempfile.TemporaryDirectory() as place:
            args = name, Path(place)
            reading = self.pool.submit(
                self.readers.run, receive_random, *args, transport, tp_size=target
            )
            self.writers.run(send_random, *args, target, transport, tp_size=source)
            assert reading.result() == [True] * target

    def check_computed(self, family: str, source: int, target: int, transport: str) -> None:
        with tempfile.TemporaryDirectory() as place:
            args = self.model(family), Path(place)
            reading = self.pool.submit(
                self.readers.run, receive_computed, *args, transport, tp_size=target
            )
            sent = self.writers.run(send_computed, *args, target, transport, tp_size=source)
            for rank, (received, computed) in enumerate(reading.result()):
                assert_equal(received, heads_of(sent, family, rank, target))
                if source == target:
                    assert_equal(received, computed)
                    continue
                # Other numbers of ranks add the same terms up in another order.
                for ours, theirs in zip(received, computed, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    def close(self) -> None:
        self._stack.close()


def heads_of(sent: list[Tokens], family: str, rank: int, size: int) -> Tokens:
    """What the writers computed of the heads that rank `rank` of `size` holds."""
    sources = [held_heads(LAYOUTS[family].for_rank(i, len(sent))) for i in range(len(sent))]
    wanted = held_heads(LAYOUTS[family].for_rank(rank, size))
    rank_of = {head: i for i, heads in enumerate(sources) for head in heads}
    return [
        [
            torch.stack(
                [
                    sent[rank_of[head]][part][layer][sources[rank_of[head]].index(head)]
                    for head in wanted
                ]
            )
            for layer in range(len(sent[0][part]))
        ]
        for part in range(len(sent[0]))
    ]


def assert_equal(ours: Tokens, theirs: Tokens) -> None:
    for part, other in zip(ours, theirs, strict=True):
        for one, two in zip(part, other, strict=True):
            assert torch.equal(one, two)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    pairs = Pairs(2, 4, tmp_path_factory.mktemp("models"))
    yield pairs
    pairs.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_of_a_reader_hold_what_the_ranks_of_a_writer_computed(
    few: Pairs, family: str
) -> None:
    few.check_computed(family, 2, 4, "memory")


def test_equal_numbers_of_ranks_hold_to_the_bit_what_they_would_have_computed(few: Pairs) -> None:
    few.check_computed("eight heads", 2, 2, "memory")


def test_random_bytes_arrive_in_every_rank(few: Pairs) -> None:
    few.check_random("int8", 2, 4, "memory")
    few.check_random("two heads", 2, 1, "memory")


@pytest.mark.slow
def test_every_pair_of_rank_counts(tmp_path: Path) -> None:
    pairs = Pairs(max(SIZES), max(SIZES), tmp_path)
    try:
        for number, (source, target) in enumerate(itertools.product(SIZES, SIZES)):
            transport = ("memory", "mooncake")[number % 2]
            for name in MODELS:
                pairs.check_random(name, source, target, transport)
            for family in FAMILIES:
                pairs.check_computed(family, source, target, transport)
    finally:
        pairs.close()
