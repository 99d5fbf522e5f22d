"""What pipefit predicts of a setup: bytes of the measured rank, whether it fits, and seconds of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from setups import Setup
from stream_pools import copies, reserved_bytes
from zero_buffers import flat_bytes

from pipefit import Plan, certify, simulate
from pipefit.memory import AllocatorSettings
from pipefit.schema.trace import CATEGORIES, AllocatorPeaks, Category, DeviceTrace, MemorySample
from pipefit.simulator import Simulation

_PARAMETERS, _GRADIENTS, _BOUNDARY = (
    CATEGORIES.index(each) for each in (Category.PARAMETERS, Category.GRADIENTS, Category.BOUNDARY)
)
_STATE = (_PARAMETERS, _GRADIENTS, CATEGORIES.index(Category.OPTIMIZER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak bytes of a device: as pipefit says by default, and with what the setup adds; and whether all devices fit."""

    default_bytes: int
    allocated_bytes: int
    reserved_bytes: int | None
    used_bytes: int | None
    fits: bool


def memory(setup: Setup, *, reserved: bool) -> Memory:
    """Return the peak of the measured device, of the fullest, or the sum over all devices.

    Reserved bytes need a dry run, which takes seconds a device; without `reserved` they are None, and what fits is
    decided by tensors alone.
    """
    plan = setup.plan
    own = {device.device: device for device in simulate(plan).devices}
    devices = traces = list(evenly_divided(plan, own))
    fits = all(peak(setup, device) <= plan.cluster.budgets[device.device] for device in devices)
    if setup.rank is not None:
        devices = [device for device in devices if device.device == setup.rank]
    if not setup.summed:
        devices = [max(devices, key=lambda device: peak(setup, device))]
    figures = {}
    if reserved:
        dry = certify(setup.task, plan, target="cuda", allocator=AllocatorSettings())
        figures = {device.device: device.allocator for device in dry.devices if device.allocator}
        fits = fits and all(_has_room(setup, device, figures.get(device.device)) for device in traces)
    overheads = plan.cluster.devices[0].kind.overheads
    default = added = in_reserve = outside = 0
    for device in devices:
        found, own_peak = figures.get(device.device), own[device.device].peak_bytes
        default += found.allocated_bytes if found else own_peak + 2 * overheads.cublas_workspace_bytes
        added += peak(setup, device) - own_peak
        in_reserve += found.reserved_bytes + _of_streams(setup, device) if found else 0
        outside += overheads.context_bytes + _communicators(setup, device) * overheads.communicator_bytes
    flat = _flat(setup, devices[0])
    used = (in_reserve if reserved else default) + added + outside + flat
    fits = fits and (not flat or used <= plan.cluster.devices[devices[0].device].memory_bytes)
    return Memory(
        default_bytes=default,
        allocated_bytes=default + added,
        reserved_bytes=in_reserve + added if reserved else None,
        used_bytes=used,
        fits=fits,
    )


def evenly_divided(plan: Plan, devices: Mapping[int, DeviceTrace]) -> Iterator[DeviceTrace]:
    """Yield the devices of a plan's stages with the model state that each has if replicas divide tensors.

    A layer has one owner in pipefit; in frameworks every replica owns an equal part of every tensor, or of a buffer.
    """
    for stage in plan.stages:
        step = stage.grid.tensor
        for place, device in enumerate(stage.devices):
            own = devices[device]
            others = [devices[other].memory for other in stage.devices[place % step :: step]]
            if stage.grid.shard == "none" or len({len(memory) for memory in others}) > 1:
                yield own
                continue
            memory = []
            for samples in zip(own.memory, *others, strict=True):
                levels = list(samples[0].bytes)
                for each in _STATE:
                    levels[each] = sum(sample.bytes[each] for sample in samples[1:]) // len(others)
                memory.append(replace(samples[0], bytes=tuple(levels)))
            yield replace(own, memory=tuple(memory))


def _communicators(setup: Setup, device: DeviceTrace) -> int:
    """Return the communicators of a device: of replicas, tensor-parallel ranks, each neighbour's directions, all."""
    stages = setup.plan.stages
    if len(setup.plan.workers) == 1:
        return 0
    grid = next(stage.grid for stage in stages if device.device in stage.devices)
    ends = (device.device not in stages[0].devices) + (device.device not in stages[-1].devices)
    return 1 + (grid.data > 1) + (grid.tensor > 1) + 2 * ends


def _flat(setup: Setup, device: DeviceTrace) -> int:
    """Return the bytes of a device's flat buffers under DeepSpeed."""
    if setup.largest_parameter is None:
        return 0
    grid = next(stage.grid for stage in setup.plan.stages if device.device in stage.devices)
    parameters = device.memory[0].bytes[_PARAMETERS] // 2
    wide = (setup.gradient_bytes or 2) > 2
    return flat_bytes(parameters, setup.largest_parameter, grid.data, wide=wide)


def _of_streams(setup: Setup, device: DeviceTrace) -> int:
    """Return the bytes that segments of other streams need more than copies between stages in the same one."""
    if not setup.copies_on_streams:
        return 0
    plan, count = setup.plan, setup.microbatches
    number = next(number for number, stage in enumerate(plan.stages) if device.device in stage.devices)
    received, returned = copies(plan)
    kept = (
        plan.profile.at(plan.training.microbatch_size).costs[plan.stages[number].start].inputs
        if number
        else ()
    )
    fullest = max(device.memory, key=lambda sample: sample.total_bytes)
    counted = count * sum(value.nbytes for value in kept) + fullest.bytes[_BOUNDARY]
    return reserved_bytes(received.get(number, ()), returned.get(number, ()), count) - counted


def _has_room(setup: Setup, device: DeviceTrace, found: AllocatorPeaks | None) -> bool:
    """Return whether the reserved bytes of a device and those that the setup adds fit beside its context."""
    if found is None:
        return True
    added = peak(setup, device) - device.peak_bytes
    memory = setup.plan.cluster.devices[device.device].memory_bytes
    return found.fits and found.reserved_bytes + added + found.outside_bytes <= memory


def peak(setup: Setup, device: DeviceTrace) -> int:
    """Return the peak of a device with the setup's gradients and held output."""
    return max(_bytes(setup, device), default=0)


def _bytes(setup: Setup, device: DeviceTrace) -> Iterator[int]:
    """Yield the bytes at every action."""
    plan = setup.plan
    number = next(number for number, stage in enumerate(plan.stages) if device.device in stage.devices)
    gradients = max((sample.bytes[_GRADIENTS] for sample in device.memory), default=0)
    is_last = number == len(plan.stages) - 1
    ends = number == 0 or is_last
    for sample in device.memory:
        total = sample.total_bytes + setup.constant_bytes
        if setup.boundary_bytes is not None:
            total -= max(0, sample.bytes[_BOUNDARY] - setup.boundary_bytes * (1 if ends else 2))
        if setup.gradient_bytes is not None:
            total += _wider(setup, sample, gradients)
        if is_last and sample.action.startswith(f"{number}F"):
            total += setup.loss_bytes[0]
        elif is_last and sample.action.startswith(f"{number}B"):
            total += setup.held_bytes + setup.loss_bytes[1]
        yield total


def _wider(setup: Setup, sample: MemorySample, gradients: int) -> int:
    """Return the bytes that gradients in one buffer of another dtype add."""
    precision = setup.plan.training.precision
    own = 4 if precision.startswith(("mixed", "float32")) else 2  # autocast's gradients are float32
    return gradients // own * (setup.gradient_bytes or own) - sample.bytes[_GRADIENTS]


def seconds(setup: Setup) -> float:
    """Return the seconds of a step, or of its timed part."""
    plan, longer = setup.timed, setup.longer
    result = Simulation(plan, steps=2).step_seconds[-1]
    if longer is not None:
        of_more = Simulation(longer, steps=2).step_seconds[-1] - result
        count = plan.training.microbatches
        result += of_more * (setup.microbatches - count) / (longer.training.microbatches - count)
    return result / setup.steps_per_time
