"""Which weights a worker computes with, as a short text that can stand in a file name."""

from pathlib import Path

import xxhash

SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 16
_SUFFIXES = (".safetensors", ".gguf", ".json")


def fingerprint(path: Path) -> str:
    """Hash of the names, sizes and samples of a model's files: 32 hex digits.

    Samples are spread evenly over each file, first and last bytes included. Files that agree in all
    of them and differ elsewhere are taken for equal. Raises: OSError: unreadable files.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    digest = xxhash.xxh3_128()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size};".encode())
        last = max(size - SAMPLE_BYTES, 0)
        with file.open("rb") as data:
            for index in range(NUM_SAMPLES):
                data.seek(last * index // (NUM_SAMPLES - 1))
                digest.update(data.read(SAMPLE_BYTES))
    return digest.hexdigest()
