"""The small profiler of autograd: the allocator's events of this thread, in microseconds of overhead."""

from torch._C._profiler import _ExperimentalConfig as ExperimentalConfig
from torch.autograd import ProfilerConfig, ProfilerState  # type: ignore[attr-defined]
from torch.autograd import _disable_profiler_legacy as stop  # type: ignore[attr-defined]
from torch.autograd import _enable_profiler_legacy as start  # type: ignore[attr-defined]

__all__ = ["ExperimentalConfig", "ProfilerConfig", "ProfilerState", "start", "stop"]
