"""The attention kernels that are enabled."""

from torch.nn.attention import _cur_sdpa_kernel_backends as enabled_kernels

__all__ = ["enabled_kernels"]
