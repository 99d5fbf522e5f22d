"""Settings of CUDA's caching allocator, in the syntax of `PYTORCH_CUDA_ALLOC_CONF`.

    AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:64")

Accepted settings and bounds are those of torch 2.15 (`c10/core/AllocatorConfig.cpp` and
`c10/cuda/CUDAAllocatorConfig.h`), and the tests compare them with torch. Torch ignores unknown keys; here
they are refused, and so are keys whose effect on memory is not simulated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pipefit.errors import UsageError
from pipefit.texts import shortened
from pipefit.units import MIB, WHOLE

ENVIRONMENT = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the first that is set counts
MIN_BLOCK = 512  # every block is a multiple of it
SMALL = MIB  # the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB  # size of a segment of the small pool
MIN_LARGE = 10 * MIB  # from here on a request gets a separate segment...
ROUND_LARGE = 2 * MIB  # ...rounded up to a multiple of this
PAGE = 2 * MIB  # of a GPU: physical memory is mapped in multiples of it

_NUMBER = re.compile(WHOLE)
_INTERVALS = 16  # intervals of sizes from 1 MiB to 64 GiB, each with a division of the powers of two
# Settings of host memory, locks and graphs, which do not change a device's bytes
_ON_HOST = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
    }
)
_NOT_SIMULATED = {
    "garbage_collection_threshold": "frees cached blocks by their age",
    "throw_on_cudamalloc_oom": "raises an error before it frees cached blocks",
    "expandable_segments_reserve": "limits expandable segments",
    "expandable_segments_reserve_by_class": "limits expandable segments",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """The allocator's treatment of sizes.

    Args:
        expandable: one segment for each pool and stream, which grows by pages, instead of many of fixed size.
        large_segment_bytes: segment shared by requests above 1 MiB and below 10 MiB; the page of an
            expandable segment.
        max_split_bytes: free blocks of this size or more are neither split nor given to smaller requests;
            None splits all.
        non_split_rounding_bytes: limit of the bytes by which such a block may exceed a request; None for
        `large_segment_bytes`.
        roundup_divisions: for sizes from 1, 2, 4 ... MiB on, the number of steps in each doubling to which
            requests are
        rounded up; 0 and 1 round to 512 bytes.
        memory_fraction: of the device's memory that may be reserved.
    """

    expandable: bool = False
    large_segment_bytes: int = 20 * MIB
    max_split_bytes: int | None = None
    non_split_rounding_bytes: int | None = None
    roundup_divisions: tuple[int, ...] = (0,) * _INTERVALS
    memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        large, split = self.large_segment_bytes, self.max_split_bytes
        if large <= MIN_LARGE:
            raise UsageError(f"large_segment_size_mb must be above 10, not {large / MIB:g}")
        if self.expandable and large % PAGE:
            raise UsageError(
                "large_segment_size_mb must be even with expandable_segments, whose pages are multiples of "
                f"2 MiB, not {large / MIB:g}"
            )
        for name, nbytes in (
            ("max_split_size_mb", split),
            ("max_non_split_rounding_mb", self.non_split_rounding_bytes),
        ):
            if nbytes is not None and nbytes < large:
                raise UsageError(
                    f"{name} must be at least large_segment_size_mb, {large / MIB:g}, not {nbytes / MIB:g}"
                )
        if not 0 < self.memory_fraction <= 1:
            raise UsageError(
                f"per_process_memory_fraction must be above 0 and at most 1, not {self.memory_fraction:g}"
            )

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Parse settings such as `expandable_segments:True,max_split_size_mb:64`.

        Raises:
            UsageError: an unknown key, one that is not simulated, or a value that torch refuses; names it.
        """
        result: dict[str, Any] = {}
        for key, value in _pairs(text):
            if key in _NOT_SIMULATED:
                raise UsageError(
                    f"the allocator setting {key} is not simulated, because it {_NOT_SIMULATED[key]}; "
                    "remove it from the simulated settings, or compare requested bytes"
                )
            if key == "backend" and value != "native":
                raise UsageError(
                    f"the allocator backend {shortened(repr(value))} is not simulated: only torch's own "
                    "backend, native, is"
                )
            if key in _KEYS:
                field, read = _KEYS[key]
                result[field] = read(key, value)
            elif key != "backend" and key not in _ON_HOST:
                known = ", ".join(sorted((*_KEYS, *_ON_HOST, "backend")))
                raise UsageError(
                    f"{shortened(repr(key))} is not a setting of CUDA's caching allocator (known: {known})"
                )
        return replace(cls(), **result)

    def __str__(self) -> str:
        """Return the text form; empty for torch's defaults."""
        usual = type(self)()
        return ",".join(
            f"{key}:{_written(getattr(self, field))}"
            for key, (field, _) in _KEYS.items()
            if getattr(self, field) != getattr(usual, field)
        )

    def divisions(self, nbytes: int) -> int:
        """Return the number of steps in the doubling that contains `nbytes`."""
        return self.roundup_divisions[min(max(nbytes.bit_length() - MIB.bit_length(), 0), _INTERVALS - 1)]

    def rounded(self, nbytes: int) -> int:
        """Return the size of the block for a request of `nbytes` (`round_size` in
        CUDACachingAllocator.cpp).
        """
        if nbytes <= MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.divisions(nbytes)
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            return _divided(nbytes, divisions)
        return -(-nbytes // MIN_BLOCK) * MIN_BLOCK

    def segment(self, nbytes: int) -> int:
        """Return the size of the segment for a block of `nbytes` (`get_allocation_size`)."""
        if nbytes <= SMALL:
            return SMALL_SEGMENT
        if nbytes < MIN_LARGE:
            return self.large_segment_bytes
        return -(-nbytes // ROUND_LARGE) * ROUND_LARGE


def _divided(nbytes: int, divisions: int) -> int:
    """Round `nbytes` up to a multiple of its power of two divided by `divisions`."""
    step = (1 << nbytes.bit_length() - 1) // divisions
    return -(-nbytes // step) * step


# ---- Reading and writing


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(f'{1 << place}:{divisions}' for place, divisions in enumerate(value))}]"
    return str(value // MIB if type(value) is int else value)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of a text with their values; brackets hold commas and colons together."""
    written, depth, start = "".join(text.split()), 0, 0
    for place, sign in enumerate(f"{written},"):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth <= 0:
            if place > start:
                key, colon, value = written[start:place].partition(":")
                if not colon or not value or depth:
                    raise UsageError(
                        f"{shortened(repr(written[start:place]))} is not an allocator setting: write "
                        "key:value pairs, separated by commas"
                    )
                yield key, value
            start = place + 1
    if depth:
        raise UsageError(f"{shortened(repr(text))} has an unclosed bracket")


def _mib(key: str, value: str) -> int:
    return _whole(key, value) * MIB


def _whole(key: str, value: str) -> int:
    if not _NUMBER.fullmatch(value):
        raise UsageError(f"{key} takes a whole number, not {shortened(repr(value))}")
    return int(value)


def _flag(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise UsageError(f"{key} takes True or False, not {shortened(repr(value))}")
    return value == "True"


def _part(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{key} takes a number, not {shortened(repr(value))}") from None


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """Parse `4`, for all sizes, or `[64:8,128:2,>:1]`.

    The first entry holds for all smaller sizes, `>` for all larger ones.
    """
    if not value.startswith("["):
        return (_power(key, value, least=1),) * _INTERVALS
    result, last = [0] * _INTERVALS, None
    for entry in filter(None, value.removeprefix("[").removesuffix("]").split(",")):
        size, _, number = entry.partition(":")
        divisions = _power(key, number, least=0)
        if size == ">":
            start = 1 if last is None else last + 1
            result[start:] = [divisions] * (_INTERVALS - start)
            continue
        place = min(_power(key, size, least=1).bit_length() - 1, _INTERVALS - 1)
        if last is None:
            result[:place] = [divisions] * place
        result[place], last = divisions, place
    return tuple(result)


def _power(key: str, value: str, *, least: int) -> int:
    number = _whole(key, value)
    if number < least or number & (number - 1):
        raise UsageError(f"{key} takes powers of two, not {shortened(repr(value))}")
    return number


_KEYS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable", _flag),
    "large_segment_size_mb": ("large_segment_bytes", _mib),
    "max_non_split_rounding_mb": ("non_split_rounding_bytes", _mib),
    "max_split_size_mb": ("max_split_bytes", _mib),
    "per_process_memory_fraction": ("memory_fraction", _part),
    "roundup_power2_divisions": ("roundup_divisions", _divisions),
}
