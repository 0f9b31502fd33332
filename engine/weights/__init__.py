"""Model files: what the model is, and its weights."""

from engine.weights.loader import load_model_config, load_weights

__all__ = ["load_model_config", "load_weights"]
