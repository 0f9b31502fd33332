"""LoRA adapters of one model: loaded, used side by side in a batch, and unloaded while it serves.

Files are PEFT folders: adapter_config.json and adapter_model.safetensors. The leader of several
ranks reads them and hands each rank its part.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import UnsupportedModel, WeightsError
from engine.layers.low_rank import AdapterRows
from engine.rank_adapters import AdapterWeights, LowRank, RankAdapters
from engine.scheduler_output import ScheduledRequest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Options of PEFT that change the maths, and the values that do not.
_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
}


class AdapterHolder(Protocol):
    """Other ranks, which hold parts of the same adapters."""

    def put(self, key: str, weights: AdapterWeights) -> None:
        """See `RankAdapters.put`."""
        ...

    def drop(self, keys: Collection[str]) -> None:
        """See `RankAdapters.drop`."""
        ...


class Adapters:
    """Belongs to one engine loop thread, as the model does."""

    def __init__(self, own: RankAdapters, others: AdapterHolder | None = None) -> None:
        """own: of this rank. others: what the other ranks hold; None: there are none."""
        self._own = own
        self._holders: list[AdapterHolder] = [own] if others is None else [own, others]
        self._keys: dict[str, str] = {}
        self._held: set[str] = set()

    @property
    def names(self) -> Sequence[str]:
        """What new requests may ask for."""
        return sorted(self._keys)

    def key(self, name: str) -> str:
        """What a request keeps of an adapter: its name and its weights' identity.

        Raises: ValueError: not loaded.
        """
        if name not in self._keys:
            loaded = ", ".join(self.names) or "none"
            raise ValueError(f"adapter {name!r} is not loaded; loaded: {loaded}")
        return self._keys[name]

    def load(self, name: str, folder: Path) -> None:
        """Read an adapter, or the new one of that name; requests that run keep the old one.

        Raises: UnsupportedModel: an option or a target that is not built.
            WeightsError: files are missing, damaged, or not for this model. ValueError: no name.
        """
        if not name:
            raise ValueError("an adapter needs a name")
        weights = self._read(folder)
        digest = xxhash.xxh3_64_hexdigest((folder / WEIGHTS).read_bytes())
        key = f"{name}@{digest}-{_scaling(_read_config(folder))}"
        for holder in self._holders:
            holder.put(key, weights)
        self._held.add(key)
        self._keys[name] = key

    def unload(self, name: str) -> None:
        """Let no new request ask for it; its weights stay until `free`.

        Raises: ValueError: not loaded.
        """
        self.key(name)
        del self._keys[name]

    def free(self, in_use: Collection[str]) -> None:
        """Drop weights that no name stands for and no request has, by the keys `in_use`."""
        unused = self._held - set(self._keys.values()) - set(in_use)
        if unused:
            for holder in self._holders:
                holder.drop(unused)
        self._held -= unused

    def rows_of(self, scheduled: Sequence[ScheduledRequest]) -> dict[str, Tensor]:
        """The rows of a step that have an adapter, by its key."""
        rows: dict[str, list[Tensor]] = {}
        first = 0
        for entry in scheduled:
            if key := entry.request.adapter:
                rows.setdefault(key, []).append(torch.arange(first, first + entry.num_tokens))
            first += entry.num_tokens
        return {key: torch.cat(parts) for key, parts in rows.items()}

    @property
    def batch(self) -> AdapterRows:
        """What the runner tells of the step's rows."""
        return self._own.rows

    def _read(self, folder: Path) -> AdapterWeights:
        scaling = _scaling(_read_config(folder))
        path = folder / WEIGHTS
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
        found: dict[str, LowRank] = {}
        for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
            stem = key.removesuffix(".lora_A.weight")
            a, b = tensors.pop(key), tensors.pop(f"{stem}.lora_B.weight", None)
            name = stem.removeprefix(_PREFIX)
            wanted = self._own.shape(name)
            if wanted is None:
                raise UnsupportedModel(f"{key} in {path}: no projection here takes an adapter")
            if b is None:
                raise WeightsError(f"{path} has {key}, but no {stem}.lora_B.weight")
            if (b.shape[0], a.shape[1]) != wanted or a.shape[0] != b.shape[1]:
                raise WeightsError(
                    f"{stem} in {path}: lora_B {list(b.shape)} times lora_A {list(a.shape)} "
                    f"is no weight {list(wanted)}"
                )
            found[name] = LowRank(a.float(), scaling * b.float())
        if tensors or not found:
            raise UnsupportedModel(f"{path} holds {next(iter(tensors), 'nothing')}, not LoRA alone")
        return found


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{path} holds no JSON object")
    for key, supported in _SUPPORTED.items():
        if config.get(key) not in supported:
            raise UnsupportedModel(f"{key} is {config.get(key)!r} in {path}, not supported")
    return config


def _scaling(config: Mapping[str, Any]) -> float:
    """alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA (arXiv 2312.03732)."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise WeightsError(f"r is {rank!r} and lora_alpha {alpha!r} in {CONFIG}")
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
