"""What goes wrong in the engine because of what it was given.

EngineError
 +-- UnsupportedModel   files that ask for something that is not built; also a ValueError
 +-- WeightsError       files that are damaged or not of this model; also a ValueError
"""

__all__ = ["EngineError", "UnsupportedModel", "WeightsError"]


class EngineError(Exception):
    """Root of the engine's errors."""


class UnsupportedModel(EngineError, ValueError):
    """An architecture, rope type, quantisation or file format that is not implemented."""


class WeightsError(EngineError, ValueError):
    """Weight files that cannot be read, or whose tensors are not those of the model."""
