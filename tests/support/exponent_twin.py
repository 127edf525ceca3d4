"""The slow twin of the exponent codec: its payload written by numpy, a block at a time."""

import numpy as np

BLOCK, GROUP = 4096, 64


def to_bits(codes: np.ndarray, k: int) -> bytes:
    return np.packbits((codes[:, None] >> np.arange(k)) & 1, bitorder="little").tobytes()


def zeros_to(num_bytes: int, section: bytes) -> bytes:
    return section + b"\0" * (-(num_bytes + len(section)) % 64)


def coded(exponents: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes, padded to whole groups, and the escapes."""
    codes = np.full(256, len(table), np.uint8)
    codes[table] = np.arange(len(table))
    found = codes[exponents]
    return np.pad(found, (0, -len(found) % GROUP)), exponents[found == len(table)]


def encode(words: np.ndarray, plan: bytes) -> bytes:
    """The payload of ``words`` (u16 or u32) under a plan section."""
    bits = 8 * words.itemsize
    tables = [np.frombuffer(plan[16 * i + 16 :][: (1 << plan[i]) - 1], np.uint8) for i in range(3)]
    padding = np.full(-len(words) % GROUP, int(tables[0][0]) << (bits - 9), words.dtype)
    words = np.concatenate([words, padding])
    turned = (words << 1) | (words >> (bits - 1))
    exponents = (turned >> (bits - 8)).astype(np.uint8)
    upper, lower = (turned >> (bits - 16) & 255).astype(np.uint8), turned.astype(np.uint16)
    rest = b"".join(
        (lower[i : i + GROUP].tobytes() if bits == 32 else b"") + upper[i : i + GROUP].tobytes()
        for i in range(0, len(words), GROUP)
    )
    codes, ends, tail = b"", [], b""
    for first in range(0, len(words), BLOCK):
        found, left = coded(exponents[first : first + BLOCK], tables[0])
        codes, counts, body = codes + to_bits(found, plan[0]), [len(left)], b""
        for table, k in zip(tables[1:], plan[1:3], strict=True):
            found, left = coded(left, table)
            counts, body = [*counts, len(left)], body + to_bits(found, k)
        tail += np.array([*counts, 0], "<u2").tobytes() + body + left.tobytes()
        ends.append(len(tail))
    text = b""
    for section in (plan, codes, rest, np.array(ends, "<u8").tobytes()):
        text += zeros_to(len(text), section)
    return text + tail
