"""torchgpipe's own `balance_by_time`, run for real: what its users get. A baseline for the other benchmarks.

    python benchmarks/torchgpipe_balance.py --layers 6 --filters 32 --devices 4

It times every layer of the model on this machine's CPU and splits the times with torchgpipe's solver, which is not
exact: compare with `planner="time"`, too, so that a better solver is not booked as a better model.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torchgpipe.balance import balance_cost
from torchgpipe.balance.profile import profile_times

from pipefit.capture import Task, capture
from pipefit.capture.chain import ChainLayer, packed
from pipefit.models import build


class _Layer(nn.Module):
    """A layer of a chain as torchgpipe calls one: with a tensor or a tuple of them.

    An activation in place is given copies: torchgpipe's profiler hands it leaves, which may not be changed.
    """

    def __init__(self, layer: ChainLayer) -> None:
        super().__init__()
        self.module, self.layer = layer.module, layer
        inplace = any(getattr(part, "inplace", False) for part in layer.module.modules())
        self.copies = inplace and not any(True for _ in layer.module.parameters())

    def forward(self, values: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        given = values if isinstance(values, tuple) else (values,)
        return packed(self.layer(tuple(value.clone() for value in given) if self.copies else given), "bare")


def torchgpipe_times(task: Task, *, samples: int, seconds: float = 1.0) -> list[int]:
    """Microseconds of every layer, forward and backward, as torchgpipe measures them: the sums over its repeats, which
    go on for about so many seconds.
    """
    inputs, targets = task.batch(samples)
    chain = capture(task, inputs, targets)
    layers = nn.Sequential(*map(_Layer, chain.layers))
    return profile_times(layers, packed(chain.flatten(inputs), "bare"), seconds, torch.device("cpu"))


def torchgpipe_split(times: list[int], devices: int) -> list[int]:
    """Number of layers for every device, by torchgpipe's own solver. `balance_by_time` is this after the measuring."""
    return balance_cost(times, devices)


def main() -> None:
    """Prints the split of AmoebaNet-D."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--filters", type=int, default=32)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2)
    given = parser.parse_args()
    task = build("amoebanet", layers=given.layers, filters=given.filters)
    print("-".join(map(str, torchgpipe_split(torchgpipe_times(task, samples=given.samples), given.devices))))


if __name__ == "__main__":
    main()
