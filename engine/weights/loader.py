"""From a model folder or a .gguf file to a model that is ready to run."""

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.checkpoint.config import parse_model_config
from engine.checkpoint.gguf_config import gguf_model_config
from engine.checkpoint.quantization import DESCRIPTION, Scheme, read_scheme
from engine.config import ModelConfig, Quantization
from engine.errors import UnsupportedModel, WeightsError
from engine.layers.layer import Shard, WeightedLayer, finish_packing, weighted_layers
from engine.layers.quantization import RoundedRows
from engine.models.decoder import DecoderForCausalLM
from engine.weights.gguf import gguf_tensors, with_divisors
from engine.weights.gguf_file import read_gguf
from engine.weights.mapped_file import MappedFile
from engine.weights.quantized_safetensors import combine
from engine.weights.safetensors import open_safetensors
from engine.weights.source import Index, SourceTensor
from kernels.quantized import QuantizedRows

Progress = Callable[[int, int], None]
"""Called with the weights (numbers, not tensors) loaded so far, and their total."""

# Buffers that older checkpoints carry and nobody reads.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.masked_bias")
_MAX_NAMED = 5
_NUMBERS_AT_A_TIME = 1 << 17
_LIBC = ctypes.CDLL(None)


def load_model_config(path: Path) -> ModelConfig:
    """Read what the model at `path` is: a folder with config.json, or a .gguf file.

    Raises: UnsupportedModel, WeightsError: see engine.checkpoint.config and engine.weights.gguf.
    """
    if path.suffix == ".gguf":
        file = read_gguf(path)
        return with_divisors(gguf_model_config(path, file.header), file)
    config = _read_json(path / "config.json")
    if config is None:
        raise WeightsError(f"{path} is neither a .gguf file nor a folder with a config.json")
    _read_scheme(path, config)
    return parse_model_config(config, _read_json(path / "generation_config.json"))


def _read_scheme(folder: Path, config: dict[str, Any] | None) -> Scheme | None:
    quantization_config = (config or {}).get("quantization_config")
    return read_scheme(quantization_config, _read_json(folder / DESCRIPTION))


def load_weights(
    path: Path,
    model: DecoderForCausalLM,
    progress: Progress | None = None,
    num_threads: int = 2,
    quantization: Quantization = "none",
) -> int:
    """Fill every weight of `model` from `path` and pack it; once per model. Never unpickles.

    `progress` is called in the caller's thread. Weights in few bits are read, rounded and packed
    some rows at a time; a layer in floats is packed as soon as it is filled. So beyond the packed
    weights at most `num_threads` layers exist, and of the files' pages what is being read.

    Returns how many bytes of the files were read: a rank reads its part.
    Raises: WeightsError: tensors are missing, unexpected or of another shape.
        UnsupportedModel: a format that is not built.
    """
    sources, files = _open(path)
    jobs = _match(path, model, sources, quantization)
    _run(jobs, progress, num_threads)
    finish_packing(model)
    return sum(file.num_bytes_read for file in files)


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor to fill, and which part of the checkpoint's it is; None: all of it."""

    tensor: Tensor
    shard: Shard | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        shape = list(self.tensor.shape)
        if self.shard is not None:
            shape[self.shard.dim] = self.shard.span.total
        return tuple(shape)

    @property
    def index(self) -> Index:
        """Where this rank's part is in the checkpoint's tensor."""
        index = [slice(0, size) for size in self.tensor.shape]
        if self.shard is not None:
            index[self.shard.dim] = self.shard.span.index
        return tuple(index)

    def fill(self, source: SourceTensor) -> None:
        """Read this rank's part, some rows at a time."""
        num_rows = len(self.tensor)
        step = max(1, _NUMBERS_AT_A_TIME * num_rows // max(1, self.tensor.numel()))
        for row in range(0, num_rows, step):
            stop = min(row + step, num_rows)
            self.tensor[row:stop] = self._read(source, slice(row, stop))

    def rounded(self, source: SourceTensor, quantization: Quantization) -> RoundedRows:
        """This rank's part, read and rounded when it is packed."""
        num_rows, num_columns = self.tensor.shape
        return RoundedRows((num_rows, num_columns), partial(self._read, source), quantization)

    def _read(self, source: SourceTensor, rows: slice) -> Tensor:
        first, *others = self.index
        return source.read((slice(first.start + rows.start, first.start + rows.stop), *others))


class _LayerJob:
    """Fills one layer and packs it, then the layers that share its weight."""

    def __init__(
        self,
        prefix: str,
        layer: WeightedLayer,
        targets: dict[str, "_Target"],
        sources: list[SourceTensor],
        quantization: Quantization,
    ) -> None:
        self.size = sum(target.tensor.numel() for target in targets.values())
        self._prefix = prefix
        self._layer = layer
        self._targets = targets
        self._sources = sources
        self._quantization = quantization
        self.sharing: list[WeightedLayer] = []

    def run(self) -> int:
        """Return how many numbers were loaded."""
        self._load()
        # NOTE: at once. Until then the weight may exist in its plain form.
        for layer in self.sharing:
            layer.pack(self._quantization)
        # NOTE: or parts on their way would leave holes between packed weights, a fifth of their
        # size in all. Torch needs glibc, so it is here.
        _LIBC.malloc_trim(0)
        return self.size

    def _load(self) -> None:
        quantized = self._quantized()
        rest = [source for source in self._sources if source.name not in quantized]
        self._fill(rest)
        if quantized:
            prefix_length = len(self._prefix)
            by_name = {name[prefix_length:]: weight for name, weight in quantized.items()}
            if self._layer.pack_quantized(by_name):
                self._targets.clear()
                return
            self._fill([source for source in self._sources if source.name in quantized])
        self._layer.pack(self._quantization)

    def _fill(self, sources: list[SourceTensor]) -> None:
        for source in sources:
            # NOTE: memory of a tensor is not committed before it is written, and nothing but the
            # layer refers to it once it was popped here, so that packing frees it.
            self._targets.pop(source.name).fill(source)

    def _quantized(self) -> dict[str, QuantizedRows]:
        """What the layer takes in few bits; nothing unless all of it is to be had so."""
        # A shared weight has the form that the layer needs which multiplies with it.
        rounding = [*self.sharing, self._layer][0].rounding(self._quantization)
        wanted = {self._prefix + name for name in self._layer.quantizable()}
        found: dict[str, QuantizedRows] = {}
        for source in self._sources:
            if source.name not in wanted:
                continue
            target = self._targets[source.name]
            if self._quantization in ("auto", "native"):
                rows = source.quantized(target.index)
            elif rounding in ("int8", "int4"):
                rows = target.rounded(source, rounding)
            else:
                rows = None
            if rows is None:
                return {}
            found[source.name] = rows
        return found


def _match(
    path: Path,
    model: DecoderForCausalLM,
    sources: list[SourceTensor],
    quantization: Quantization,
) -> list[_LayerJob]:
    by_name = {source.name: source for source in sources}
    layers = [(prefix, layer, _targets(prefix, layer)) for prefix, layer in weighted_layers(model)]
    targets = {name: target for _, _, weights in layers for name, target in weights.items()}
    for prefix, layer in weighted_layers(model):
        for name in layer.elsewhere():
            by_name.pop(prefix + name, None)
    if "lm_head.weight" not in targets:  # tied: some checkpoints hold the shared weight twice
        by_name.pop("lm_head.weight", None)
    for name in [name for name in by_name if _is_ignored(name, model)]:
        del by_name[name]
    _check(path, targets, by_name)
    if quantization == "native" and all(s.form is None for s in by_name.values()):
        raise UnsupportedModel(
            f"quantization is native, but {path} holds no weights in a form that can be kept: "
            "use auto, none, int8 or int4"
        )
    jobs = {
        id(layer): _LayerJob(
            prefix, layer, weights, [by_name[name] for name in weights], quantization
        )
        for prefix, layer, weights in layers
        if layer.shares() is None
    }
    for _, layer, _ in layers:
        if (owner := layer.shares()) is not None:
            jobs[id(owner)].sharing.append(layer)
    return list(jobs.values())


def _is_ignored(name: str, model: DecoderForCausalLM) -> bool:
    return name.endswith(_IGNORED_SUFFIXES) or name.startswith(model.unused_prefixes)


def _targets(prefix: str, layer: WeightedLayer) -> dict[str, _Target]:
    shards = layer.shards()
    return {prefix + name: _Target(tensor, shards.get(name)) for name, tensor in layer.weights()}


def _open(path: Path) -> tuple[list[SourceTensor], list[MappedFile]]:
    """The checkpoint's tensors, and the files that they are read from."""
    if path.suffix == ".gguf":
        file = read_gguf(path)
        return gguf_tensors(file, gguf_model_config(path, file.header)), [file.file]
    if path.is_dir():
        scheme = _read_scheme(path, _read_json(path / "config.json"))
        sources, files = open_safetensors(path, is_quantized=scheme is not None)
        return sources if scheme is None else combine(sources, scheme), files
    raise UnsupportedModel(f"{path} is neither a folder nor a .gguf file")


def _check(path: Path, targets: Mapping[str, _Target], sources: Mapping[str, SourceTensor]) -> None:
    problems = []
    if missing := [f"{n} {list(targets[n].shape)}" for n in targets if n not in sources]:
        problems.append(f"missing: {_some(missing)}")
    if unexpected := [f"{n} {list(sources[n].shape)}" for n in sources if n not in targets]:
        problems.append(f"unexpected: {_some(unexpected)}")
    if mismatching := [
        f"{name} {list(sources[name].shape)}, the model has {list(target.shape)}"
        for name, target in targets.items()
        if name in sources and sources[name].shape != target.shape
    ]:
        problems.append(f"of another shape: {_some(mismatching)}")
    if problems:
        raise WeightsError(f"the tensors in {path} are not the model's; " + "; ".join(problems))


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _run(jobs: list[_LayerJob], progress: Progress | None, num_threads: int) -> None:
    total = sum(job.size for job in jobs)
    done = 0
    # Largest first: no thread is left alone with the embedding at the end, and what is large is
    # packed while little else is resident.
    order = sorted(jobs, key=lambda job: -job.size)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
        futures = [pool.submit(job.run) for job in order]
        try:
            for future in as_completed(futures):
                done += future.result()
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        contents = json.loads(path.read_text())
    except ValueError as error:
        raise WeightsError(f"{path} is no JSON: {error}") from error
    if not isinstance(contents, dict):
        raise WeightsError(f"{path} holds no JSON object")
    return contents
