"""The time to find the units of a traced model is linear in its operations and modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import fx, nn

from pipefit.capture.data_flow import Flow
from pipefit.capture.traced import Units


def flow_of(module: nn.Module) -> Flow:
    """Build a flow of one operation per leaf, in order; equal bytes cross every cut, and all cuts are
    allowed.
    """
    order = []
    for path, part in module.named_modules():
        if not any(True for _ in part.children()):
            names = path.split(".")
            node = fx.Graph().placeholder("x")
            node.meta["stack"] = ("", *(".".join(names[: n + 1]) for n in range(len(names))))
            order.append(node)
    count = len(order)
    made = SimpleNamespace(order=tuple(order), cost=[4] * count, count=[1] * count, legal=[True] * count)
    return cast("Flow", made)


def calls_of(function: Callable[[], Any]) -> int:
    """Return the number of calls and generator steps of a function, C functions included."""
    made = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return made


def of_two_classes(count: int) -> nn.Module:
    """Return a list of blocks of two alternating classes."""
    kinds = (nn.Sequential, lambda *parts: nn.ModuleDict({str(n): part for n, part in enumerate(parts)}))
    return nn.ModuleDict(
        {"blocks": nn.ModuleList(kinds[number % 2](nn.Linear(1, 1), nn.ReLU()) for number in range(count))}
    )


def lists_in_blocks(count: int) -> nn.Module:
    """Return a list of blocks, each with a list of parts with parts."""
    blocks = (
        nn.ModuleList(nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(2)) for _ in range(count)
    )
    return nn.ModuleDict({"blocks": nn.ModuleList(nn.ModuleDict({"parts": parts}) for parts in blocks)})


def of_lone_parts(count: int) -> nn.Module:
    """Return sibling modules without a container."""
    parent = nn.Module()
    for number in range(count):
        parent.add_module(f"part{number}", nn.Linear(1, 1))
    return parent


@pytest.mark.sample(3)
@pytest.mark.parametrize("deeper", [False, True])
@pytest.mark.parametrize("made", [of_two_classes, lists_in_blocks, of_lone_parts])
def test_twice_as_many_blocks_take_twice_the_work(made: Callable[[int], nn.Module], deeper: bool) -> None:
    """Four times the blocks need less than five times the calls."""
    modules = [made(count) for count in (40, 160)]
    flows = [flow_of(module) for module in modules]
    few, many = (
        calls_of(lambda flow=flow, module=module: Units(flow, module, deeper=deeper).of_all)  # type: ignore[misc]
        for flow, module in zip(flows, modules, strict=True)
    )
    assert many < 5 * few
