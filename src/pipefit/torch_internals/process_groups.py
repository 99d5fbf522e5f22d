"""Process groups that carry out several operations as one."""

import torch.distributed

__all__ = ["end_coalescing", "start_coalescing"]

start_coalescing = torch.distributed.ProcessGroup._start_coalescing
end_coalescing = torch.distributed.ProcessGroup._end_coalescing
