"""Parsing and formatting of sizes and times: `parse_bytes("256MiB")`, `format_bytes(268435456)`.

Internally a size is an `int` of bytes and a time a `float` of seconds; units appear only in input and output.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from pipefit.errors import UsageError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
# A whole number in a regular expression. No input needs more digits, and `int` raises for more than 4300.
WHOLE = "[0-9]{1,18}"
_SIZE = re.compile(rf"\s*({WHOLE}(?:\.{WHOLE})?)\s*([a-zA-Z]*)\s*")
_BITS = re.compile(rf"\s*({WHOLE}(?:\.{WHOLE})?)\s*([kKMGT])b(?:ps)?")
_PERCENT = re.compile(rf"\s*({WHOLE}(?:\.{WHOLE})?)\s*%\s*")
_LONGEST = 60  # characters of a refused text that a message repeats


def parse_bytes(text: str, *, least: Literal[0, 1] = 1) -> int:
    """Parse `"256MiB"` (binary), `"24GB"` (decimal) or `"1048576"`; with `least` 0 also `"0"`.

    A number below 1024 without a unit is treated as a forgotten unit.

    Raises:
        UsageError: not a size, an unknown or missing unit, or less than `least` bytes.
    """
    match = _SIZE.fullmatch(text)
    unit = match and _UNITS.get(match[2].lower())
    if not match or not unit:
        raise UsageError(
            f"{text[:_LONGEST]!r} is not a size: write a positive number and a unit, such as 256MiB, 24GB or "
            "1048576"
        )
    nbytes = round(float(match[1]) * unit)
    if not match[2] and 0 < nbytes < KIB:
        raise UsageError(
            f"{text!r} lacks a unit: write {match[1]}GiB or {match[1]}MiB, or {match[1]}B for bytes"
        )
    if nbytes < least:
        raise UsageError(f"{text!r} is too small: memory must be at least one byte")
    return nbytes


def parse_rate(text: str) -> int:
    """Parse bytes per second: `"25GB/s"`, or a size without `/s`.

    Raises:
        UsageError: not a size, or one in bits, as networks are specified: `"200Gb/s"`.
    """
    size = text.strip().removesuffix("/s")
    if bits := _BITS.fullmatch(size):
        eighth = f"{float(bits[1]) / 8:g}{bits[2].upper()}B/s"
        raise UsageError(f"{text!r} is in bits: write {eighth}, or {bits[1]}{bits[2].upper()}B/s for bytes")
    return parse_bytes(size)


def parse_part(text: str, whole: int) -> int:
    """Parse a size, which may be `"0"`, or a percentage of `whole` bytes, such as `"5%"`; return bytes.

    Raises:
        UsageError: neither.
    """
    if percent := _PERCENT.fullmatch(text):
        return round(whole * float(percent[1]) / 100)
    try:
        return parse_bytes(text, least=0)
    except UsageError as error:
        raise UsageError(f"{error}; or a share of the memory, such as 5%") from None


def format_bytes(nbytes: int) -> str:
    """Format `nbytes` in the largest binary unit that leaves at least one, with two decimals: `13.50 GiB`,
    `812 B`.
    """
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} B"


def format_number(value: float) -> str:
    """Format `value` with three significant digits and without an exponent: `30.4`, `3,160`, `0.00321`."""
    return f"{Decimal(f'{value:.3g}'):,f}"


def format_seconds(seconds: float) -> str:
    """Format `seconds` with three significant digits: `1.23 s`, `45.6 ms`, `789 us`."""
    return _scaled(seconds, (1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if seconds else "0 s"


def format_flops(flops: int) -> str:
    """Format floating-point operations with three significant digits: `148 GFLOP`, `3.21 MFLOP`, `0 FLOP`."""
    return _scaled(flops, (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1, "FLOP"))


def _scaled(value: float, *units: tuple[float, str]) -> str:
    """Format the rounded value in the largest unit that leaves at least one, or else in the smallest."""
    rounded = float(f"{value:.3g}")
    unit, name = next((one for one in units if abs(rounded) >= one[0]), units[-1])
    return f"{format_number(rounded / unit)} {name}"
