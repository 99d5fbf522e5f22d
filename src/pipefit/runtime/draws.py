"""Random draws that are the same under every plan: they depend on seed, step, microbatch and layer alone.

Before a layer runs, the device's default generator is seeded from these four numbers. So dropout is the same on one
device and on eight, under any schedule, and in a recomputation. An optimizer that draws is seeded in the same way, so
that replicas of a stage draw alike and stay equal.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def draw_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """A well-mixed 63-bit number from the four (the splitmix64 finaliser, Steele et al. 2014, applied in turn)."""
    state = 0
    for number in (seed, step, microbatch, layer):
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_layer(device: torch.device, seed: int, step: int, microbatch: int, layer: int) -> None:
    """Seed the default generator of `device` for this layer of this microbatch of this step."""
    number = draw_seed(seed, step, microbatch, layer)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def seed_update(device: torch.device, seed: int, step: int, microbatch: int, first: int) -> None:
    """Seed the default generator of `device` for the update of a run of layers that begins at layer `first`."""
    seed_layer(device, seed, step, microbatch, -1 - first)  # which is the number of no layer
