"""Reading fields of a config.json."""

from collections.abc import Mapping
from typing import Any

from engine.errors import UnsupportedModel, WeightsError

Json = Mapping[str, Any]


def read_int(config: Json, key: str) -> int:
    """The number under `key`.

    Raises: WeightsError: there is none.
    """
    if config.get(key) is None:
        raise WeightsError(f"config.json has no {key}")
    return int(config[key])


def require(config: Json, key: str, default: object, *supported: object) -> object:
    """The value under `key`, or the default.

    Raises: UnsupportedModel: it is none of the supported ones.
    """
    value = config.get(key)
    value = default if value is None else value
    if value not in supported:
        names = ", ".join(map(repr, supported))
        raise UnsupportedModel(f"{key} is {value!r}, supported: {names}")
    return value
