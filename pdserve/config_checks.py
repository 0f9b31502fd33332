"""What of a configuration is wrong that no single field shows, before any model is looked at."""

import ipaddress
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from engine.parallel_config import ParallelConfig
from pdserve.config import ServiceConfig, why_8_bits_are_no_use
from pdserve.errors import ConfigError
from pdserve.units import format_bytes
from proxy.auth import load_keys

_SERVICE_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_HOST_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_MAX_HOST_CHARS = 253
_MAX_MODEL_NAME_CHARS = 256
NPU_BLOCK_SIZE = 128
"""Tokens per block that the NPU's operators take."""
_GRAPH_MODES = {
    "auto": ("auto", "eager", "native"),
    "cpu": ("auto", "eager", "native"),
    "reference": ("auto", "eager"),
    "npu": ("auto", "eager", "torchair", "aclgraph"),
}
# Times travel as milliseconds in 32 bits, to workers and to the kernel.
_MAX_DURATION_S = 7 * 24 * 3600.0


def check(config: ServiceConfig) -> None:
    """Refuse what no single field shows.

    Raises: ConfigError: with every problem.
    """
    problems = [
        *_check_addresses(config),
        *_check_cache(config),
        *_check_steps(config),
        *_check_times(config),
        *_check_ranks(config),
        *_check_context_parallel(config),
        *_check_npus(config),
        *_check_activations(config),
    ]
    if problems:
        raise ConfigError(problems)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_ray_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    return text in ("local", "auto") or (is_port and is_host(host.strip("[]")))


def is_host(text: str) -> bool:
    """Whether `text` is an IP address, or could be the name of a host."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.removesuffix(".").split(".")
        return len(text) <= _MAX_HOST_CHARS and all(map(_HOST_LABEL.fullmatch, labels))
    return True


def _check_addresses(config: ServiceConfig) -> list[str]:
    problems = []
    if not _SERVICE_NAME.fullmatch(config.service):
        problems.append(
            f"service: {config.service} is not allowed: lower-case letters, digits and dashes"
        )
    if not is_host(config.host):
        problems.append(f"host: {json.dumps(config.host)} is not allowed: an address or host name")
    name = config.public_name
    key = "model" if config.served_model_name is None else "served_model_name"
    if not name.isprintable() or name != name.strip() or len(name) > _MAX_MODEL_NAME_CHARS:
        problems.append(
            f"{key}: {json.dumps(name)} is not allowed as the name that clients use: at most "
            f"{_MAX_MODEL_NAME_CHARS} printable characters, no space at either end"
        )
    if not _is_ray_address(config.ray.address):
        address = json.dumps(config.ray.address)
        problems.append(f"ray.address: {address} is not allowed: local, auto or HOST:PORT")
    if config.http_port == config.grpc_port != 0:
        problems.append(f"http_port and grpc_port are both {config.http_port}: they must differ")
    try:
        load_keys(config.proxy)
    except (ValueError, OSError) as error:
        problems.append(f"API keys: {error}")
    if not is_loopback(config.host) and not config.needs_key and not config.insecure:
        problems.append(
            f"host is {config.host}, which other machines may reach, and there are no API keys: "
            "set proxy.api_keys_file or PDSERVE_API_KEY, use 127.0.0.1, or pass --insecure"
        )
    return problems


def _check_cache(config: ServiceConfig) -> list[str]:
    problems, decoder = [], config.decoder
    # What is longer than a prefiller's cache, decoders compute themselves.
    num_blocks = decoder.num_blocks if decoder.replicas else None
    num_tokens = (num_blocks or 0) * config.block_size
    if num_blocks and config.max_model_len and num_tokens < config.max_model_len:
        problems.append(
            f"decoder.num_blocks is {num_blocks}, which holds {num_tokens} tokens: "
            f"max_model_len {config.max_model_len} needs at least "
            f"{-(-config.max_model_len // config.block_size)} blocks"
        )
    roles = (config.prefiller, config.decoder)
    total_bytes = sum(r.kv_cache_bytes * r.replicas * r.num_ranks for r in roles)
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.is_local and total_bytes > machine_bytes:
        problems.append(
            f"the KV caches (kv_cache_bytes times replicas and ranks) take "
            f"{format_bytes(total_bytes)}, this machine has {format_bytes(machine_bytes)}"
        )
    return problems


def _check_steps(config: ServiceConfig) -> list[str]:
    problems, prefiller, mode = [], config.prefiller, config.decoder.graph_mode
    if prefiller.max_num_seqs > prefiller.max_num_batched_tokens:
        problems.append(
            f"prefiller.max_num_seqs is {prefiller.max_num_seqs}: at most "
            f"prefiller.max_num_batched_tokens, which is {prefiller.max_num_batched_tokens}"
        )
    allowed = _GRAPH_MODES[config.ops]
    if mode not in allowed:
        problems.append(
            f"decoder.graph_mode is {mode}, with ops {config.ops} it is one of {', '.join(allowed)}"
        )
    if config.decoder.async_scheduling == "on":
        num_ranks = config.decoder.num_ranks
        if num_ranks > 1:
            problems.append(
                f"decoder.async_scheduling is on: takes a decoder of one rank, tp times dp is "
                f"{num_ranks}; auto and off go with any"
            )
        if config.speculation != "none":
            problems.append(
                f"decoder.async_scheduling is on: does not go with speculation "
                f"{config.speculation}, which drafts from the last step's tokens; use auto or off"
            )
    return problems


def _check_context_parallel(config: ServiceConfig) -> list[str]:
    prefiller, problems = config.prefiller, []
    if prefiller.cp == 1:
        return []
    cp = f"prefiller.cp is {prefiller.cp}"
    if prefiller.dp > 1:
        problems.append(f"{cp} and prefiller.dp is {prefiller.dp}: one of them must be 1")
    if prefiller.dual_batch_overlap:
        problems.append(f"{cp} and prefiller.dual_batch_overlap is true: only one of them")
    if config.speculation == "mtp":
        problems.append(f"{cp} and speculation is mtp: use ngram or none")
    return problems


def _check_ranks(config: ServiceConfig) -> list[str]:
    problems = []
    for name, role in (("prefiller", config.prefiller), ("decoder", config.decoder)):
        num_ranks, times_cp = role.tp * role.dp, ""
        if name == "prefiller" and config.prefiller.cp > 1:
            num_ranks *= config.prefiller.cp
            times_cp = f" times cp {config.prefiller.cp}"
        if num_ranks % role.ep:
            problems.append(
                f"{name}.ep is {role.ep}: must divide the {num_ranks} ranks, "
                f"which is tp {role.tp} times dp {role.dp}{times_cp}"
            )
        if role.dp > 1 and config.speculation == "mtp":
            problems.append(f"speculation mtp does not go with {name}.dp: use ngram or none")
        if problem := role.eplb.problem(role.ep):
            problems.append(f"{name}: {problem}")
        if role.shared_experts_beside and role.shared_experts == "tp":
            problems.append(
                f"{name}.shared_experts_beside: shared_experts must be replicated, not tp"
            )
        if role.dual_batch_overlap and role.tp == role.ep == 1:
            problems.append(
                f"{name}.dual_batch_overlap: with tp 1 and ep 1 no layer waits for other ranks"
            )
        if role.layer_sharding and role.num_ranks == 1:
            problems.append(f"{name}.layer_sharding: there is one rank, no other to hold layers")
    return problems + [f"prefiller.{problem}" for problem in _pipeline_problems(config)]


def _pipeline_problems(config: ServiceConfig) -> list[str]:
    role = config.prefiller
    if role.dp > 1 and role.cp > 1:
        return []  # which is refused already
    parallel = ParallelConfig(
        dp_size=role.dp,
        cp_size=role.cp,
        tp_size=role.tp,
        # NOTE: with what it does not go with either, it is refused already.
        dual_batch_overlap=role.dual_batch_overlap and role.tp > 1 and role.cp == 1,
        pp_size=role.pp,
        pp_layers=role.pp_layers,
        eplb=role.eplb,
        layer_sharding=role.layer_sharding,
    )
    return parallel.pipeline_problems(has_tiers=config.tiers.is_on, speculation=config.speculation)


def _check_npus(config: ServiceConfig) -> list[str]:
    if config.ops != "npu":
        return []
    problems = []
    if config.ray.npus_per_worker == 0:
        problems.append(
            "ray.npus_per_worker is 0 with ops npu: all workers would take the same NPU; set it to "
            "1, so that Ray gives each process one of its own"
        )
    if config.block_size != NPU_BLOCK_SIZE:
        problems.append(
            f"block_size is {config.block_size}, ops npu takes {NPU_BLOCK_SIZE} and no other"
        )
    if config.transfer.checksum != "off":
        problems.append(
            f"transfer.checksum is {config.transfer.checksum}: the host cannot read an NPU's "
            "memory; set it to off with ops npu"
        )
    return problems


def _check_activations(config: ServiceConfig) -> list[str]:
    if config.cpu.activation_bits != 8:
        return []
    said = "cpu.activation_bits is 8: changes nothing with"
    return [f"{said} {reason}" for reason in why_8_bits_are_no_use(config)]


def _check_times(config: ServiceConfig) -> list[str]:
    problems = [
        f"{name}: {value} is not allowed: at most {_MAX_DURATION_S:.0f} s (7 days)"
        for name, value in _durations(asdict(config), "")
        if value > _MAX_DURATION_S
    ]
    renew_s = config.proxy.lease_renew_s
    if 2 * renew_s > config.lease_s:
        problems.append(
            f"proxy.lease_renew_s is {renew_s}: a lease of {config.lease_s} s (lease_s) must "
            f"survive one lost renewal, so at most {config.lease_s / 2}"
        )
    return problems


def _durations(values: dict[str, Any], path: str) -> Iterator[tuple[str, float]]:
    """Every setting that is a number of seconds and is set, by its dotted name."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _durations(value, f"{path}{name}.")
        elif name.endswith("_s") and value is not None:
            yield f"{path}{name}", value
