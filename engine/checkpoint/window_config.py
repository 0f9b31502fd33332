"""Sliding-window attention in a config.json: how far back, and in which layers."""

from engine.architectures import Architecture
from engine.checkpoint.fields import Json, read_int
from engine.errors import UnsupportedModel, WeightsError

# Their sliding_window is on whenever it is there; Qwen's has a switch, and others have none.
_ALWAYS_ON: frozenset[Architecture] = frozenset({"MistralForCausalLM", "MixtralForCausalLM"})
_SWITCHED: frozenset[Architecture] = frozenset(
    {"Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}
)
_KINDS = ("full_attention", "sliding_attention")


def parse_windows(config: Json, architecture: Architecture) -> tuple[int, frozenset[int]]:
    """How many tokens a query sees, its own included, and in which layers; 0 and none: no windows.

    `layer_types`, a kind per layer, goes before `max_window_layers`, the layers without a window.

    Raises: UnsupportedModel: another kind of layer, or a window in a family that has none.
        WeightsError: fields contradict each other.
    """
    num_layers = read_int(config, "num_hidden_layers")
    layers = _window_layers(config, architecture, num_layers)
    if not layers:
        return 0, frozenset()
    window = read_int(config, "sliding_window")
    if window < 1:
        raise WeightsError(f"sliding_window is {window}, must be at least 1")
    return window, layers


def _window_layers(config: Json, architecture: Architecture, num_layers: int) -> frozenset[int]:
    if (kinds := config.get("layer_types")) is not None:
        return _by_kind(kinds, architecture, num_layers)
    if architecture in _ALWAYS_ON and config.get("sliding_window") is not None:
        return frozenset(range(num_layers))
    if architecture in _SWITCHED and config.get("use_sliding_window"):
        first = 0 if architecture == "Qwen3MoeForCausalLM" else config.get("max_window_layers", 28)
        return frozenset(range(int(first), num_layers))
    return frozenset()


def _by_kind(kinds: list[str], architecture: Architecture, num_layers: int) -> frozenset[int]:
    if others := sorted(set(kinds) - set(_KINDS)):
        raise UnsupportedModel(
            f"layer_types has {', '.join(others)}, supported: {', '.join(_KINDS)}"
        )
    if len(kinds) != num_layers:
        raise WeightsError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    layers = frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if layers and architecture not in _ALWAYS_ON | _SWITCHED:
        raise UnsupportedModel(
            f"layer_types has sliding_attention, supported for {architecture}: full_attention"
        )
    return layers
