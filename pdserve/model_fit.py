"""Whether a configuration and the model's files go together, asked before anything starts.

The workers check the same again, and what takes their device or the weights.
"""

from collections.abc import Iterator

from engine.errors import EngineError
from engine.fit import rank_problems, with_draft_layers
from engine.kv_layout import max_block_bytes
from engine.worker.config import WorkerConfig
from pdserve.config import ServiceConfig, settle, worker_configs
from pdserve.errors import ConfigError
from pdserve.model_files import ModelFiles


def fit(config: ServiceConfig, model: ModelFiles) -> ServiceConfig:
    """Fill in what follows from the model; refuse what asks of it what it does not have.

    Raises: ConfigError: with every problem; each names field, value and limit.
    """
    problems = [*_length_problems(config, model), *_weight_problems(config, model)]
    config = settle(config, is_latent=model.is_latent)
    workers = worker_configs(config, model_path=str(model.path), token="")
    replicas = (config.prefiller.replicas, config.decoder.replicas)
    for role, number, worker in zip(("prefiller", "decoder"), replicas, workers, strict=True):
        if number:
            problems += _role_problems(role, worker, model, reads_files=config.is_local)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config


def _length_problems(config: ServiceConfig, model: ModelFiles) -> Iterator[str]:
    asked, longest = config.max_model_len, model.config.max_position_embeddings
    if asked is not None and asked > longest:
        yield f"max_model_len is {asked}: the model takes {longest} tokens at most"


def _weight_problems(config: ServiceConfig, model: ModelFiles) -> Iterator[str]:
    if config.quantization == "native" and not model.may_keep:
        yield (
            f"quantization is native, but {model.path} holds no weights in a form that can be "
            "kept: use auto, none, int8 or int4"
        )
    if config.kv_cache_dtype == "int8" and config.ops == "npu" and model.is_latent:
        yield "kv_cache_dtype is int8: ops npu take latents in floats alone, use auto"


def _role_problems(
    role: str, worker: WorkerConfig, model: ModelFiles, *, reads_files: bool
) -> Iterator[str]:
    try:
        config = with_draft_layers(model.config, worker.speculation, worker.num_draft_tokens)
    except EngineError as error:
        yield str(error)
        return
    found = rank_problems(config, worker.parallel, reads_files=reads_files)
    yield from (f"{role}.{setting}: {problem}" for setting, problem in found.items())
    if found or worker.num_blocks is not None:
        return
    dtype = "bfloat16" if worker.ops_backend == "npu" else "float32"
    if worker.kv_cache_dtype == "int8":
        dtype = "int8"
    num_bytes = max_block_bytes(config, worker.block_size, worker.parallel, dtype)
    if worker.kv_cache_bytes < num_bytes:
        yield (
            f"{role}.kv_cache_bytes is {worker.kv_cache_bytes}: must be at least {num_bytes}, "
            f"which one block of {worker.block_size} tokens (block_size) takes"
        )
    elif role == "decoder" and worker.max_model_len is not None:
        # What is longer than a prefiller's cache, decoders compute themselves.
        needed = -(-worker.max_model_len // worker.block_size) * num_bytes
        if worker.kv_cache_bytes < needed:
            yield (
                f"{role}.kv_cache_bytes is {worker.kv_cache_bytes}: max_model_len "
                f"{worker.max_model_len} needs at least {needed}"
            )
