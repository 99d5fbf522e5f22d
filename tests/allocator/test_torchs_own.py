"""The simulated caching allocator against torch's, whose library runs here over a driver without a GPU.

`make allocator` builds it: libc10_cuda.so of torch's CUDA build, with `own/driver.c` as its libcudart. Every
figure after every event is compared, and the address of every block.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from pipefit.errors import OutOfMemory
from pipefit.memory.cuda_allocator import AllocatorSettings, CachingAllocator

OWN = Path(__file__).parents[2] / "build" / "allocator"
MIB = 1 << 20
SETTINGS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:64,max_non_split_rounding_mb:32",
    "large_segment_size_mb:32",
    "large_segment_size_mb:12,expandable_segments:True",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,16:8,>:1],expandable_segments:True",
    "per_process_memory_fraction:0.5",
    "per_process_memory_fraction:1.0,expandable_segments:True",
    "per_process_memory_fraction:0.7,expandable_segments:True",
]
PLENTY, LITTLE = 1 << 40, 600 * MIB

pytestmark = pytest.mark.skipif(not OWN.exists(), reason="torch's own allocator is not there: make allocator")

Line = tuple[str, int, int, int]  # `a`, `f`, `e` or `s`; a name, bytes and a stream


def history(rng: Random, length: int, most: int) -> list[Line]:
    """Draw allocations on two streams and frees, of `most` bytes together, emptied caches, and
    a final state.
    """
    edges = [1, 512, 513, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB, 21 * MIB]
    living, found = dict[int, int](), list[Line]()
    for name in range(length):
        size = rng.choice([rng.choice(edges), int(2 ** rng.uniform(6, 26)), rng.randint(1, 40) * 512 * 1024])
        while living and (rng.random() < 0.4 or sum(living.values()) + size > most):
            gone = rng.choice(list(living))
            del living[gone]
            found.append(("f", gone, 0, 0))
        living[name] = size
        found.append(("a", name, size, int(rng.random() < 0.2)))
        found += [("e", 0, 0, 0)] * (rng.random() < 0.02) + [("s", 0, 0, 0)] * (rng.random() < 0.1)
    return [*found, ("s", 0, 0, 0)]


def torchs(lines: Sequence[Line], settings: str, memory: int) -> list[str]:
    """Return the answers of torch's allocator; failed allocations are not freed."""
    words = {"a": "a {} {} {}", "f": "f {}", "e": "e", "s": "s"}
    text = "\n".join(words[what].format(*rest) for what, *rest in lines)
    environment = os.environ | {
        "PYTORCH_CUDA_ALLOC_CONF": settings, "DRIVER_MEMORY": str(memory), "LD_LIBRARY_PATH": str(OWN)
    }  # fmt: skip
    return subprocess.run(
        [OWN / "events"], input=text, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def simulated(lines: Sequence[Line], settings: str, memory: int) -> list[str]:
    """Return the answers of the simulated allocator, in the same words."""
    own, blocks, answers = CachingAllocator(AllocatorSettings.parse(settings), memory), {}, list[str]()
    for what, name, size, stream in lines:
        told = ""
        if what == "s":
            for number, one in enumerate(own.snapshot()):
                states = [f"{block.nbytes}:{block.requested_bytes}" for block in one.blocks]
                answers.append(
                    " ".join([str(number), str(one.nbytes), str(one.stream), str(int(one.small)), *states])
                )
            answers.append(".")
            continue
        if what == "e":
            own.empty_cache()
        if what == "f" and name in blocks:
            own.free(blocks.pop(name))
        if what == "a":
            try:
                blocks[name] = own.allocate(size, stream)
            except OutOfMemory:
                told = "oom "
        answers.append(f"{told}{own.requested} {own.allocated} {own.reserved} {own.retries}")
    return answers


def counted(answers: Sequence[str]) -> list[str]:
    """Return the answers with segments numbered by their addresses."""
    found, segments = list[str](), list[str]()
    for line in answers:
        if line == ".":
            segments.sort(key=lambda one: int(one.split()[0]))
            found += [" ".join([str(n), *one.split()[1:]]) for n, one in enumerate(segments)] + [line]
            segments.clear()
        elif ":" not in line:
            found.append(line)
        else:
            segments.append(line)
    return found


@pytest.mark.parametrize("memory", [PLENTY, LITTLE], ids=["plenty", "little"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_it_does_what_torchs_own_does(settings: str, memory: int) -> None:
    """After every event of three random histories the numbers and every block's address are torch's, also
    when the driver's memory ends mid-history or for one request.
    """
    for seed in range(3):
        lines = history(Random(f"{settings} {seed}"), 400, min(memory, 700 * MIB))
        answers = counted(torchs(lines, settings, memory))
        assert simulated(lines, settings, memory) == answers
        assert memory == PLENTY or any(line.startswith("oom") for line in answers)
