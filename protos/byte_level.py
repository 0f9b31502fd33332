"""The alphabet of byte-level vocabularies, which the proxy and the grammars of the engine undo.

Source: GPT-2's vocabulary.
"""


def byte_level_table() -> dict[int, int]:
    """Code point to byte: printable Latin-1 stands for itself, the rest, in order, from 256 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: byte for byte in own} | {256 + rank: byte for rank, byte in enumerate(others)}
