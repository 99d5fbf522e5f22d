"""GPUs in a process that has used fake ones: where they train, and which generators are put back."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from pipefit.errors import UsageError
from pipefit.fake.target import FakeTarget
from pipefit.runtime.hardware import check_streams

GPU = torch.device("cuda", 0)


def test_a_stream_of_its_own_is_refused_after_fake_devices() -> None:
    """Backwards would run on the default stream without waiting; on the default stream there is nothing to refuse."""
    with FakeTarget("cuda"):
        pass
    with (
        mock.patch.object(torch.cuda, "current_stream", return_value="own") as current,
        mock.patch.object(torch.cuda, "default_stream", return_value="default"),
    ):
        with pytest.raises(UsageError, match="cuda:0 trains on a stream of its own"):
            check_streams([GPU])
        current.return_value = "default"
        check_streams([GPU])


def test_without_fake_devices_any_stream_may_be_used() -> None:
    """Where no target has been used, autograd follows the GPU's streams, and nothing is asked."""
    with mock.patch.object(torch._C, "_get_privateuse1_backend_name", return_value="privateuseone"):
        check_streams([GPU])
