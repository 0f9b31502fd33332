"""GGUF files as the gguf package writes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf


@contextmanager
def gguf_writer(path: Path, arch: str = "llama") -> Iterator[gguf.GGUFWriter]:
    """Takes metadata and tensors; the file is written at the end."""
    writer = gguf.GGUFWriter(path, arch)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    """What every architecture says; config: with the names of transformers."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
