"""Description of the tensors that ranks shard."""

from __future__ import annotations

from dataclasses import replace

from pipefit.schema.profile import Shares, Whole


def test_all_is_divided_only_where_nothing_is_left_whole() -> None:
    """A single undivided byte out of a million is reported; all of zero bytes counts as none."""
    all_but_one = Shares(
        ranks=2,
        parameter_bytes=1_000_000,
        divided_bytes=999_999,
        rank_bytes=500_001,
        flops=7,
        divided_flops=7,
        whole=(),
    )
    assert "shard 99.9 % of 976.56 KiB" in str(all_but_one) and str(all_but_one).endswith(
        "100.0 % of the operations"
    )
    assert str(replace(all_but_one, flops=0, divided_flops=0)).endswith("0.0 % of the operations")


def test_operations_that_stay_whole_alike_are_told_once() -> None:
    """Each operation appears once, with the layers that have it and their number; the largest comes first."""
    head = Whole(layer="head", operator="linear", parameter_bytes=2048, flops=3000, reason="it is cheap")
    small = replace(head, parameter_bytes=1024)
    others = tuple(replace(small, layer=layer) for layer in ("block0", "block0", "block1"))
    told = str(
        Shares(
            ranks=2,
            parameter_bytes=8,
            divided_bytes=4,
            rank_bytes=6,
            flops=2,
            divided_flops=1,
            whole=(head, *others),
        )
    )
    assert told.splitlines()[1:] == [
        "  whole: linear of head (2.00 KiB of parameters, 3 kFLOP): it is cheap",
        "  whole: linear of block0, block1 (3 of these, each 1.00 KiB of parameters, 3 kFLOP): it is cheap",
    ]
