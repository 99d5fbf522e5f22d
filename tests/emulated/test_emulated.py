"""The emulated CUDA has the behaviour that tests rely on. Skipped on anything else, real GPUs included."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

EMULATED = torch.cuda.is_available() and torch.cuda.get_device_name(0).startswith("Emulated")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not EMULATED, reason="needs the emulated CUDA (make cuda)")]
GPU = torch.device("cuda", 0)

LATE = """
import torch
pinned = torch.ones(1 << 20, pin_memory=True)
here, beside = torch.zeros(1 << 20, device="cuda"), torch.cuda.Stream()
for _ in range(100):
    here.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        here.copy_(pinned, non_blocking=True)
    early = here.sum().item()
    if not beside.query():  # else this machine has been slower than the copy is late
        break
torch.cuda.current_stream().wait_stream(beside)
print(early, here.sum().item())
"""

MOVED = """
import torch
from pipefit.schema.devices import Member
from pipefit.runtime.offload.copying import SlotPart
from pipefit.runtime.offload.cuda import OnStreams
from pipefit.runtime.offload.lending import _pinned, pinned_slots
from pipefit.memory.arenas import Arena
NBYTES, JOINED = 1 << 20, {joined}
if not JOINED:
    OnStreams.join = lambda self, handle: None
(slot,) = pinned_slots(Arena(Member.host(0), 0, 1, NBYTES), _pinned)
copies, tensor = OnStreams.of(torch.device("cuda", 0)), torch.arange(NBYTES, device="cuda").to(torch.uint8)
wanted, storage = tensor.clone(), tensor.untyped_storage()
copies.join(copies.start([SlotPart(storage, 0, slot, 0, NBYTES)], outward=True, seconds=0.0))
storage.resize_(0)
spoils = [torch.zeros(NBYTES, dtype=torch.uint8, device="cuda") for _ in range(4)]
storage.resize_(NBYTES)
copies.join(copies.start([SlotPart(storage, 0, slot, 0, NBYTES)], outward=False, seconds=0.0))
print(torch.equal(tensor, wanted))
"""


def test_operators_compute_what_the_cpus_do() -> None:
    """Layers of several sorts give the CPU's numbers on the device, forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(288, 16), nn.LayerNorm(16)
    )
    inputs, weights = (
        torch.randn(4, 3, 8, 8),
        torch.randn(4, 16),
    )  # squares of a layer norm add up to the same number
    expected = (model(inputs) * weights).mean()
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert gradients[0].abs().max() > 1e-4, "gradients that are all but zero would tell nothing"
    model.zero_grad(set_to_none=True)
    model.to(GPU)
    found = (model(inputs.to(GPU)) * weights.to(GPU)).mean()
    found.backward()
    assert found.device == GPU
    torch.testing.assert_close(found.cpu(), expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_of_its_formula(dtype: torch.dtype) -> None:
    """The two available fused kernels match the CPU's, with their gradients."""
    tensors = [torch.randn(2, 4, 32, 16, dtype=dtype) for _ in range(3)]
    results = []
    for device in ("cpu", "cuda"):
        wanted = [tensor.to(device, copy=True).requires_grad_() for tensor in tensors]
        out = F.scaled_dot_product_attention(*wanted, is_causal=True)
        out.float().square().sum().backward()
        results.append([out.cpu(), *(tensor.grad.cpu() for tensor in wanted)])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(
            there,
            here,
            rtol=2e-2 if dtype == torch.bfloat16 else 1e-4,
            atol=2e-2 if dtype == torch.bfloat16 else 1e-5,
        )


def test_tensors_of_two_devices_do_not_mix() -> None:
    """Tensors of two devices do not mix, nor with those of the CPU, except for single numbers, as on GPUs."""
    one, other = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
    assert (one + torch.tensor(1.0)).tolist() == [2, 2]
    for wrong in (other, other.cpu()):
        with pytest.raises(RuntimeError, match=r"same device|a tensor of the CPU"):
            one + wrong


def test_draws_go_on_from_a_state() -> None:
    """Each device's generator has a separate state, which can be restored."""
    state = torch.cuda.get_rng_state(0)
    first = torch.randn(8, device=GPU)
    torch.randn(8, device="cuda:1")
    torch.cuda.set_rng_state(state, 0)
    assert torch.equal(torch.randn(8, device=GPU), first)
    assert not torch.equal(torch.randn(8, device=GPU), first)


def test_memory_ends() -> None:
    """A device has a fixed number of bytes, shared by all processes."""
    _, total = torch.cuda.mem_get_info(GPU)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device=GPU)
    kept = torch.empty(64 << 20, dtype=torch.uint8, device=GPU)
    ask = "import torch; print(torch.cuda.mem_get_info(0)[0])"
    seen = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert int(seen) <= total - kept.nbytes


def test_each_thread_that_multiplies_has_a_workspace() -> None:
    """The workspace is torch's: 32 MiB on an H100 for forwards, from the first product on, and the same for
    backwards.
    """
    ask = (
        "import torch\n"
        "def held(): return torch.cuda.memory_stats(0)['requested_bytes.all.current'] >> 20\n"
        "weight = torch.zeros(64, 64, device='cuda', requires_grad=True)\n"
        "out = weight + 1; print(held())\n"
        "out = out @ weight; print(held())\n"
        "out.sum().backward(); print(held())\n"
        "(weight @ weight).sum().backward(); print(held())\n"
    )
    seen = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert seen.split() == ["0", "32", "64", "64"]


def test_operators_wait_for_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A normalisation waits for late input from another device, which is not the current one."""
    ask = (
        "import torch\n"
        "here, there = torch.arange(64.0, device='cuda:1'), torch.zeros(64, device='cuda:2')\n"
        "torch.cuda.synchronize(1), torch.cuda.synchronize(2)\n"
        "there.copy_(here)\n"
        "print(torch.nn.functional.layer_norm(there, (64,)).abs().sum().item() > 1)\n"
    )
    monkeypatch.setenv("EMULATED_LATE", "0.2")
    assert (
        subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
        == "True\n"
    )


def test_the_driver_is_found_by_its_name() -> None:
    """The driver is found before torch has used a device, as on a machine with a GPU."""
    ask = "import ctypes; ctypes.CDLL('libcuda.so.1').cuMemcpyAsync"
    assert subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True).returncode == 0


def test_a_copy_that_nobody_joined_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that does not wait for the copy's stream finds the old bytes."""
    monkeypatch.setenv("EMULATED_LATE", "0.2")
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.0", str(float(1 << 20))]


@pytest.mark.parametrize("joined", [True, False])
def test_what_is_moved_away_comes_back_only_if_it_is_joined(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their joins, pipefit's late copies lose no byte; without them the loss is visible."""
    monkeypatch.setenv("EMULATED_LATE", "0.1")
    script = MOVED.format(joined=joined)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(joined)]
