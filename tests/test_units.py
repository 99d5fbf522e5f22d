"""Figures for readers: three digits, a suitable unit, never an exponent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.errors import UsageError
from pipefit.units import format_flops, format_number, format_seconds, parse_bytes, parse_part, parse_rate

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@given(st.floats(1e-12, 1e15))
def test_a_number_is_itself_to_three_digits_without_an_exponent(value: float) -> None:
    """It reads back as the value within half of its third digit, and holds digits, commas and a point
    only.
    """
    text = format_number(value)
    assert set(text) <= set("0123456789,.")
    assert abs(float(text.replace(",", "")) - value) <= 0.00501 * value


@given(st.floats(1e-6, 1e9))
def test_seconds_are_in_the_unit_that_leaves_less_than_a_thousand(seconds: float) -> None:
    """`999.7 ms` is rounded to `1 s`, not to a thousand milliseconds; only seconds have thousands."""
    figure, unit = format_seconds(seconds).split()
    assert abs(float(figure.replace(",", "")) * SECONDS[unit] - seconds) <= 0.00501 * seconds
    assert unit == "s" or 1 <= float(figure) < 1000


def test_a_part_is_a_size_or_a_percentage() -> None:
    """A reserve of zero is valid; signs, other units and bare percent signs are not."""
    assert [parse_part(text, 2000) for text in ("5%", " 0.1 % ", "1KiB", "0")] == [100, 2, 1024, 0]
    for wrong in ("%", "-5%", "5 percent", ""):
        with pytest.raises(UsageError, match=r"is not a size: .*; or a share of the memory, such as 5%$"):
            parse_part(wrong, 2000)


def test_a_rate_in_bits_is_refused_with_its_bytes() -> None:
    """Networks are sold in bits; a figure in bits read as bytes would be eight times too fast."""
    assert [parse_rate(text) for text in ("25GB/s", "1.5 MiB/s", "2000")] == [25 * 10**9, 3 << 19, 2000]
    for bits, words in (
        ("200Gb/s", "write 25GB/s"),
        ("400 Gbps", "write 50GB/s"),
        ("100Mb", "write 12.5MB/s"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_rate(bits)
    with pytest.raises(UsageError, match="is not a size"):
        parse_rate("fast")


def test_a_number_without_a_unit_is_a_slip_if_it_is_small() -> None:
    """`24` is refused with the suggestion of `24GiB`; `24B` and `1024` are valid, and so is zero if
    allowed.
    """
    for text in ("24", "1023"):
        with pytest.raises(UsageError, match=f"{text}GiB"):
            parse_bytes(text)
    assert [parse_bytes(text) for text in ("24B", "1024")] == [24, 1024] and parse_bytes("0", least=0) == 0


def test_operations_have_a_unit_for_every_size() -> None:
    """The unit follows the size, so that operations of a small layer are not shown as thousandths of those of
    a large one.
    """
    assert [format_flops(n) for n in (0, 5, 81_900, 3_210_000, 148_000_000_000, 10**15)] == [
        "0 FLOP", "5 FLOP", "81.9 kFLOP", "3.21 MFLOP", "148 GFLOP", "1,000 TFLOP",
    ]  # fmt: skip
