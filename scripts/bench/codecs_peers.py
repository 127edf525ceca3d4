"""What others make of the same bytes, by their own Python packages: lz4, zstd and blosc2.

Each packs into new memory of its own, as its users meet it; all of them run on one thread."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

PEERS = ("lz4", "zstd_1", "blosc2_shuffle", "blosc2_bitshuffle")
_BLOSC_LEVEL = 5


class Peer(NamedTuple):
    """One way to pack bytes, and back."""

    name: str
    pack: Callable[[np.ndarray], Any]
    unpack: Callable[[Any, int], object]  # of the packed, and how many bytes they were


def peers(asked: Collection[str]) -> list[Peer]:
    """Those of the others that are installed and asked for."""
    import lz4.block
    import zstandard

    def lz4_pack(octets: np.ndarray) -> bytes:
        return lz4.block.compress(octets, store_size=False)

    def lz4_unpack(packed: bytes, num_bytes: int) -> bytes:
        return lz4.block.decompress(packed, uncompressed_size=num_bytes)

    pack, unpack = zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress
    zstd = Peer("zstd_1", lambda octets: pack(octets.data), lambda packed, _: unpack(packed))
    blosc = [] if missing() else _blosc()
    return [peer for peer in (Peer("lz4", lz4_pack, lz4_unpack), zstd, *blosc) if peer.name in asked]


def missing() -> list[str]:
    """One sentence on rows that are left out, if there are any."""
    told = "Rows of blosc2 are left out: it is not installed; pip install blosc2 adds them."
    return [] if find_spec("blosc2") else [told]  # not among the requirements


def versions() -> dict[str, str]:
    """Releases of the packages that are installed."""
    return {name: version(name) for name in ("lz4", "zstandard", "blosc2") if find_spec(name)}


def _blosc() -> list[Peer]:
    """With lz4 behind the shuffle, as blosc2's users choose it for speed."""
    blosc2 = importlib.import_module("blosc2")
    blosc2.set_nthreads(1)

    def peer(name: str, kind: Any) -> Peer:
        def pack(words: np.ndarray) -> Any:
            return blosc2.compress(words, words.itemsize, _BLOSC_LEVEL, kind, blosc2.Codec.LZ4)

        return Peer(name, pack, lambda packed, _: blosc2.decompress(packed))

    return [peer(PEERS[2], blosc2.Filter.SHUFFLE), peer(PEERS[3], blosc2.Filter.BITSHUFFLE)]
