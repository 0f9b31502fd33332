"""Sizes and durations as people write them: `1GiB`, `500ms`."""

import re

_BYTES = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes in a size such as `1.5 GiB`, `512MB` (decimal) or `64k` (binary).

    Raises: ValueError: not a size, or not a whole number of bytes.
    """
    num_bytes = _parse(text, _BYTES, "a size such as 512MiB")
    if num_bytes != int(num_bytes):
        raise ValueError("a whole number of bytes")
    return int(num_bytes)


def parse_seconds(text: str) -> float:
    """Seconds in a duration such as `500ms`, `2s` or `5m`.

    Raises: ValueError: not a duration.
    """
    return _parse(text, _SECONDS, "a duration such as 500ms, 2s or 5m")


def format_bytes(num_bytes: float) -> str:
    """Short binary size, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def _parse(text: str, units: dict[str, int] | dict[str, float], expected: str) -> float:
    match = _QUANTITY.fullmatch(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(expected)
    return float(match[1]) * factor
