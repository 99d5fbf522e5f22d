"""Allocator settings, parsed as torch parses the same text."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipefit.errors import UsageError
from pipefit.memory.cuda_allocator import AllocatorSettings

MIB = 1 << 20
ACCEPTED = [
    "",
    "expandable_segments:True",
    "expandable_segments:False",
    "max_split_size_mb:20",
    "max_split_size_mb:40,max_non_split_rounding_mb:30",
    "large_segment_size_mb:12",
    "large_segment_size_mb:40,max_split_size_mb:64",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[256:1]",
    "roundup_power2_divisions:[>:8]",
    "roundup_power2_divisions:[512:2,128:4]",
    "roundup_power2_divisions:[1:8,>:2]",
    "roundup_power2_divisions:[131072:8]",
    "roundup_power2_divisions:[64:0]",
    "roundup_power2_divisions:[]",
    " max_split_size_mb : 64 ",
    "max_split_size_mb:40,max_split_size_mb:50",
    "pinned_use_background_threads:True,backend:native",
]
REFUSED = [
    "expandable_segments:true",
    "max_split_size_mb:19",
    "max_split_size_mb:abc",
    "max_split_size_mb:\u0666\u0664",
    f"max_split_size_mb:{'9' * 5000}",
    f"roundup_power2_divisions:[{'9' * 5000}:1]",
    "max_split_size_mb",
    "max_non_split_rounding_mb:19",
    "large_segment_size_mb:10",
    "large_segment_size_mb:40,max_split_size_mb:30",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[64:3]",
    "roundup_power2_divisions:[65:8]",
    "roundup_power2_divisions:[64:8",
]
ASK = """
import ctypes, json, sys, torch
from pathlib import Path
library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
config = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig"
instance, divisions = library[config + "8instanceEv"], library[config + "24roundup_power2_divisionsEm"]
instance.restype, divisions.argtypes, divisions.restype = ctypes.c_void_p, [ctypes.c_size_t], ctypes.c_size_t
answers = []
for text in json.load(sys.stdin):
    try:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20,max_non_split_rounding_mb:20")
        torch._C._accelerator_setAllocatorSettings(text)
    except Exception:
        answers.append(None)
        continue
    large, split, rounding = (ctypes.c_size_t * 3).from_address(instance())
    answers.append([large, split, rounding, [divisions(1 << power) for power in range(15, 40)]])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def torch_says() -> dict[str, list[object] | None]:
    """Return torch's parsed values of each text, or None if it refuses. Torch has no Python interface to
    them, so memory is read.
    """
    texts = ACCEPTED + REFUSED
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    if not library.exists() or not hasattr(ctypes.CDLL(str(library)), ENTRY):
        pytest.skip("this torch keeps its allocator's settings elsewhere")
    asked = subprocess.run(
        [sys.executable, "-c", ASK], input=json.dumps(texts), capture_output=True, text=True, check=True
    )
    return dict(zip(texts, json.loads(asked.stdout), strict=True))


ENTRY = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"


@pytest.mark.sample(8)
@pytest.mark.parametrize("text", ACCEPTED)
def test_settings_are_those_that_torch_makes_of_the_text(
    torch_says: dict[str, list[object]], text: str
) -> None:
    """Sizes and divisions equal torch's, for sizes on both sides of all intervals."""
    found = AllocatorSettings.parse(text)
    large, split, rounding, divisions = torch_says[text]
    assert found.large_segment_bytes == large
    assert (found.max_split_bytes or (1 << 64) - 1) == split
    assert (found.non_split_rounding_bytes or found.large_segment_bytes) == rounding
    assert [found.divisions(1 << power) for power in range(15, 40)] == divisions


@pytest.mark.parametrize("text", [*ACCEPTED, "per_process_memory_fraction:0.25", "large_segment_size_mb:11"])
def test_settings_are_written_as_they_are_read(text: str) -> None:
    """The text of any settings parses to the same settings; that of the defaults is empty."""
    found = AllocatorSettings.parse(text)
    assert AllocatorSettings.parse(str(found)) == found
    assert (str(found) == "") == (found == AllocatorSettings())


@pytest.mark.parametrize("text", REFUSED)
def test_what_torch_refuses_is_refused(torch_says: dict[str, list[object]], text: str) -> None:
    """A value out of bounds or of another form raises an error with the key."""
    assert torch_says[text] is None
    with pytest.raises(UsageError, match=text.split(":", maxsplit=1)[0]):
        AllocatorSettings.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size:40",
        "garbage_collection_threshold:0.5",
        "throw_on_cudamalloc_oom:True",
        "expandable_segments_reserve:0.5",
        "expandable_segments_reserve_by_class:0.5",
        "backend:cudaMallocAsync",
        "per_process_memory_fraction:half",
        "per_process_memory_fraction:1.5",
        "large_segment_size_mb:13,expandable_segments:True",
    ],
)
def test_what_is_not_simulated_is_refused_by_name(text: str) -> None:
    """An unknown key, another allocator or an invalid fraction is refused; the message names the key or its
    value.
    """
    key, value = text.split(",", maxsplit=1)[0].split(":")
    with pytest.raises(UsageError, match=f"{key}|{value}"):
        AllocatorSettings.parse(text)


def power2_div(size: int, steps: int) -> int:
    """Round `size` up as torch's test of `roundup_power2_divisions` does (test_cuda.py)."""
    power = 1
    while power < size:
        power *= 2
    step, found = power / 2 / steps, power / 2
    while found < size:
        found += step
    return power if power == size else int(found)


@given(st.integers(MIB, 1 << 36), st.sampled_from([2, 4, 8]))
def test_sizes_are_rounded_to_divisions_of_powers_of_two(nbytes: int, steps: int) -> None:
    """Sizes are rounded to divisions of powers of two, as in torch's test."""
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{steps}")
    assert settings.rounded(nbytes) == power2_div(nbytes, steps)


@given(st.integers(1, 1 << 36))
def test_without_divisions_sizes_are_rounded_to_512_bytes(nbytes: int) -> None:
    """Without divisions sizes are rounded to the next multiple of 512 bytes."""
    assert 0 <= AllocatorSettings().rounded(nbytes) - nbytes < 512
    assert AllocatorSettings().rounded(nbytes) % 512 == 0
