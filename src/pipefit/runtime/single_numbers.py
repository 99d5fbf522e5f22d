"""Where an optimizer keeps its single numbers, such as the counters of Adam's steps: on the host or on a device.

A checkpoint does not say, for it may have been saved on other devices, or by an optimizer with other options. So the
optimizer is asked: it steps a small parameter on the device, and what it makes for that is looked at. Costs a
millisecond for every group, where a parameter is not on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def kept_beside(
    make: Callable[[list[dict[str, Any]]], Optimizer], options: Mapping[str, Any], parameter: Tensor
) -> frozenset[str]:
    """The names of the single numbers that an optimizer with these options of a group keeps where a parameter is.

    None, where it cannot step a small parameter of as many dimensions.
    """
    generators = [parameter.device] if parameter.device.type == "cuda" else []
    with suppress(Exception), torch.random.fork_rng(generators, device_type="cuda"), torch.enable_grad():
        small = nn.Parameter(torch.zeros([1] * parameter.ndim, dtype=parameter.dtype, device=parameter.device))
        small.grad = torch.zeros_like(small)
        made = make([{**options, "params": [small]}])
        made.step()
        return frozenset(
            name
            for name, item in made.state[small].items()
            if isinstance(item, Tensor) and item.ndim == 0 and item.device == parameter.device
        )
    return frozenset()
