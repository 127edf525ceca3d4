"""What others make of the same bytes, by their own Python packages: lz4, zstd and blosc2.

Each packs into new memory of its own, as its users meet it; all of them run on one thread."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
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

    pack, unpack = zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress
    found = [
        Peer(
            "lz4",
            lambda octets: lz4.block.compress(octets, store_size=False),
            lambda packed, num_bytes: lz4.block.decompress(packed, uncompressed_size=num_bytes),
        ),
        Peer("zstd_1", lambda octets: pack(octets.data), lambda packed, _: unpack(packed)),
    ]
    return [peer for peer in (*found, *_blosc()) if peer.name in asked]


def missing() -> str:
    """One sentence on rows that are left out, or nothing."""
    return (
        "" if _blosc() else "Rows of blosc2 are left out: it is not installed; pip install blosc2 adds them."
    )


def versions() -> dict[str, str]:
    """Releases of the packages that are installed."""
    found = {}
    for name in ("lz4", "zstandard", "blosc2"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _blosc() -> list[Peer]:
    """With lz4 behind the shuffle, as blosc2's users choose it for speed."""
    try:
        blosc2 = importlib.import_module("blosc2")  # not among the requirements
    except ImportError:
        return []
    blosc2.set_nthreads(1)

    def peer(name: str, kind: Any) -> Peer:
        def pack(words: np.ndarray) -> Any:
            return blosc2.compress(words, words.itemsize, _BLOSC_LEVEL, kind, blosc2.Codec.LZ4)

        return Peer(name, pack, lambda packed, _: blosc2.decompress(packed))

    return [peer(PEERS[2], blosc2.Filter.SHUFFLE), peer(PEERS[3], blosc2.Filter.BITSHUFFLE)]
