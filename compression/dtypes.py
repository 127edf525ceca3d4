"""The number of every dtype in a header.

Numbers are for ever: a frame on disk outlives the release that wrote it, and no name is ever evaluated.
"""

from __future__ import annotations

import torch

# A dtype's number is its place here: append, never reorder. 0 stands for no tensor.
_NAMES = """
    none uint8 int8 bool uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64
    complex32 complex64 complex128 bcomplex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    float8_e8m0fnu float4_e2m1fn_x2 bits8 bits16 bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7
    uint1 uint2 uint3 uint4 uint5 uint6 uint7
""".split()

DTYPES: dict[int, torch.dtype] = {
    number: getattr(torch, name) for number, name in enumerate(_NAMES) if number and hasattr(torch, name)
}
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}

# What a codec's ``dtypes`` are made of: those on which ``codec=auto`` tries it.
FLOATS = frozenset(dtype for dtype in DTYPES.values() if dtype.is_floating_point)
OTHERS = frozenset(DTYPES.values()) - FLOATS
ON_REQUEST: frozenset[torch.dtype] = frozenset()  # only where it is asked for by name
