"""Names of torch's dtypes, for those who read them in documents and do without torch."""

from __future__ import annotations

from pipefit.errors import UsageError
from pipefit.texts import shortened, unknown

_FLOATS = "float64 float32 float16 bfloat16 complex128 complex64 complex32"
_SMALL_FLOATS = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
_INTEGERS = "bool int64 int32 int16 int8 uint64 uint32 uint16 uint8"
_SMALL_INTEGERS = "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"
_OTHERS = "qint8 qint32 quint8 quint2x4 quint4x2 bits8 bits16 bits1x8 bits2x4 bits4x2"
DTYPES = frozenset(" ".join((_FLOATS, _SMALL_FLOATS, _INTEGERS, _SMALL_INTEGERS, _OTHERS)).split())
_USUAL = ("float32", "bfloat16", "float16", "float64", "int64")


def check_dtype(name: str) -> None:
    """Check that torch has a dtype of that name.

    Raises:
        UsageError: it has none.
    """
    if name not in DTYPES:
        raise UsageError(unknown(f"{shortened(repr(name))} is no dtype of torch", name, _USUAL))
