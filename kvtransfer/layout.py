"""Geometry of the paged KV cache of one rank, and its identity for the handshake.

Per layer two parts, K and V, each [num_blocks, num_kv_heads, block_size, head_dim], contiguous;
with MLA the parts are latent [num_blocks, 1, block_size, kv_lora_rank] and rope [num_blocks, 1,
block_size, rope_dim]. With scales (int8 KV) each has a part of scales beside it, [num_blocks,
num_kv_heads, block_size, 1]. One head of one block is one run of bytes.
"""

from dataclasses import asdict, dataclass, replace

import xxhash

from protos import worker_pb2

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class KVPart:
    """One of the tensors of a layer."""

    name: str
    """k, v, latent or rope, or one of these followed by _scale."""
    num_heads: int
    width: int
    """Elements of one token of one head."""
    dtype: str

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token of one head."""
        return self.width * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """What must agree, or be resharded, between a writer and a reader."""

    dtype: str
    num_layers: int
    """Layers held by this rank."""
    num_kv_heads: int
    """Heads held by this rank."""
    head_dim: int
    block_size: int
    """Tokens per block."""
    tp_rank: int = 0
    tp_size: int = 1
    total_num_kv_heads: int = 0
    """Heads of the whole model; 0 means num_kv_heads."""
    kv_lora_rank: int = 0
    """MLA latent width; 0 for plain attention."""
    rope_dim: int = 0
    """MLA rope width; 0 for plain attention."""
    weights: str = "none"
    """Quantisation of the weights and activations that compute the KV: others give other KV."""
    scale_dtype: str = ""
    """Type of one scale per token and head, for quantised KV; empty: no scales."""
    first_layer: int = 0
    """Of the model, that is the first one here."""
    total_num_layers: int = 0
    """Layers of the whole model; 0 means num_layers."""
    pp_rank: int = 0
    """Which of pp_size stages, each with some of the layers, this rank is in."""
    pp_size: int = 1

    @property
    def num_model_layers(self) -> int:
        """Layers of the whole model."""
        return self.total_num_layers or self.num_layers

    @property
    def engine_rank(self) -> int:
        """This rank among all that hold a part of the same blocks."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def whole_layers(self) -> "KVLayout":
        """The same with all layers in one stage."""
        return replace(
            self,
            num_layers=self.num_model_layers,
            first_layer=0,
            total_num_layers=0,
            pp_rank=0,
            pp_size=1,
        )

    @property
    def parts(self) -> tuple[KVPart, ...]:
        """The tensors of a layer, in the order in which they are stored and hashed."""
        if self.kv_lora_rank:
            widths = {"latent": self.kv_lora_rank, "rope": self.rope_dim}
        else:
            widths = {"k": self.head_dim, "v": self.head_dim}
        parts = [KVPart(name, self.num_heads, width, self.dtype) for name, width in widths.items()]
        if self.scale_dtype:
            parts += [
                KVPart(f"{name}_scale", self.num_heads, 1, self.scale_dtype) for name in widths
            ]
        return tuple(parts)

    @property
    def num_heads(self) -> int:
        """Heads of every part: num_kv_heads, or 1 with MLA."""
        return 1 if self.kv_lora_rank else self.num_kv_heads

    @property
    def num_model_heads(self) -> int:
        """KV heads of the whole model; MLA's latent counts as one that every rank holds."""
        return 1 if self.kv_lora_rank else self.total_num_kv_heads or self.num_kv_heads

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one block in K (V is the same)."""
        return self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in K of one layer (V is the same)."""
        return self.num_kv_heads * self.head_bytes

    @property
    def block_bytes_all_layers(self) -> int:
        """Bytes that one block takes in all parts over all layers."""
        return self.num_layers * sum(self.part_block_bytes(part) for part in self.parts)

    @property
    def digest(self) -> str:
        """Hash of every field, for the handshake."""
        return xxhash.xxh3_64_hexdigest(repr(sorted(asdict(self).items())).encode())

    def shapes(self, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the first two tensors of a layer: the values, without scales."""
        first, second = (
            (num_blocks, part.num_heads, self.block_size, part.width) for part in self.parts[:2]
        )
        return first, second

    def part_block_bytes(self, part: KVPart) -> int:
        """Bytes of one block in `part` of one layer."""
        return part.num_heads * self.block_size * part.slot_bytes

    def for_rank(self, tp_rank: int, tp_size: int) -> "KVLayout":
        """The layout of rank tp_rank where the same model is split over tp_size ranks, with all
        layers in each.
        """
        total = self.num_model_heads
        return replace(
            self.whole_layers,
            tp_rank=tp_rank,
            tp_size=tp_size,
            num_kv_heads=1 if self.kv_lora_rank else max(1, total // tp_size),
            total_num_kv_heads=total,
        )

    def to_proto(self) -> worker_pb2.KVLayout:
        """The same on the wire."""
        return worker_pb2.KVLayout(**asdict(self))

    @classmethod
    def from_proto(cls, message: worker_pb2.KVLayout) -> "KVLayout":
        """Read what to_proto wrote."""
        return cls(
            dtype=message.dtype,
            num_layers=message.num_layers,
            num_kv_heads=message.num_kv_heads,
            head_dim=message.head_dim,
            block_size=message.block_size,
            tp_rank=message.tp_rank,
            tp_size=message.tp_size,
            total_num_kv_heads=message.total_num_kv_heads,
            kv_lora_rank=message.kv_lora_rank,
            rope_dim=message.rope_dim,
            weights=message.weights,
            scale_dtype=message.scale_dtype,
            first_layer=message.first_layer,
            total_num_layers=message.total_num_layers,
            pp_rank=message.pp_rank,
            pp_size=message.pp_size or 1,
        )
