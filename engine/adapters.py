"""LoRA adapters of one model: loaded, used side by side in a batch, and unloaded while it serves.

Files are PEFT folders: adapter_config.json and adapter_model.safetensors.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.errors import UnsupportedModel, WeightsError
from engine.layers.layer import weighted_layers
from engine.layers.linear import FusedLinear
from engine.layers.low_rank import AdapterRows, LowRankAdditions, LowRankDelta
from engine.scheduler import ScheduledRequest

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


@dataclass(frozen=True, slots=True)
class _Projection:
    """Where a projection named as in checkpoints is computed."""

    additions: LowRankAdditions
    columns: slice
    in_features: int


class Adapters:
    """Belongs to one engine loop thread, as the model does."""

    def __init__(self, model: nn.Module) -> None:
        self._rows = AdapterRows()
        self._projections: dict[str, _Projection] = {}
        self._keys: dict[str, str] = {}
        self._held: set[str] = set()
        for prefix, layer in weighted_layers(model):
            if isinstance(layer, FusedLinear):
                additions = LowRankAdditions(self._rows)
                layer.additions = additions
                for name, columns in layer.columns().items():
                    self._projections[prefix + name] = _Projection(
                        additions, columns, layer.in_features
                    )

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
        deltas = self._read(folder)
        digest = xxhash.xxh3_64_hexdigest((folder / WEIGHTS).read_bytes())
        key = f"{name}@{digest}-{_scaling(_read_config(folder))}"
        for additions, of_adapter in deltas.items():
            additions.put(key, of_adapter)
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
        for projection in self._projections.values():
            for key in unused:
                projection.additions.put(key, ())
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
        return self._rows

    def _read(self, folder: Path) -> dict[LowRankAdditions, list[LowRankDelta]]:
        scaling = _scaling(_read_config(folder))
        path = folder / WEIGHTS
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
        found: dict[LowRankAdditions, list[LowRankDelta]] = {}
        for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
            stem = key.removesuffix(".lora_A.weight")
            a, b = tensors.pop(key), tensors.pop(f"{stem}.lora_B.weight", None)
            projection = self._projections.get(stem.removeprefix(_PREFIX))
            if projection is None:
                raise UnsupportedModel(f"{key} in {path}: no projection here takes an adapter")
            if b is None:
                raise WeightsError(f"{path} has {key}, but no {stem}.lora_B.weight")
            wanted = (projection.columns.stop - projection.columns.start, projection.in_features)
            if (b.shape[0], a.shape[1]) != wanted or a.shape[0] != b.shape[1]:
                raise WeightsError(
                    f"{stem} in {path}: lora_B {list(b.shape)} times lora_A {list(a.shape)} "
                    f"is no weight {list(wanted)}"
                )
            delta = LowRankDelta(projection.columns, a.float(), scaling * b.float())
            found.setdefault(projection.additions, []).append(delta)
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
