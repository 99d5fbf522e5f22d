"""The meter: counted bytes, their lifetimes and categories, and the cap."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipefit.fake_cuda.target import FakeTarget
from pipefit.measure.cpu import Meter
from pipefit.measure.kernels import Kernels
from pipefit.schema.layer_costs import Kernel, KernelMemory
from pipefit.schema.trace import Category


def metered(*, kernels: bool = False, cap_bytes: int | None = None) -> Meter:
    """Return a meter at the beginning of an action, with or without this machine's kernels."""
    meter = Meter(3, kernels=Kernels(1) if kernels else None, cap_bytes=cap_bytes)
    meter.begin("2F0")
    return meter


def test_a_tensor_counts_from_birth_to_death() -> None:
    """A new tensor's bytes count until its last reference is gone."""
    with metered() as meter:
        x = torch.empty(10, 10)
        assert meter.total == 400
        y = x
        del x
        assert meter.total == 400
        del y
        assert meter.total == 0


def test_a_storage_lives_as_long_as_its_last_view() -> None:
    """Views add nothing; the whole storage counts until the last of them is gone."""
    with metered() as meter:
        x = torch.empty(10, 10)
        views = [x[0], x.t(), x.view(-1)[5:6], x.detach(), x.expand(3, 10, 10), *x.split(2)]
        assert meter.total == 400
        del x
        assert meter.total == 400
        views[:] = views[:1]
        assert meter.total == 400
        views.clear()
        assert meter.total == 0


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.view(-1),
        lambda x: x[1:],
        lambda x: x.chunk(2),
        lambda x: x.add_(1),
        lambda x: x.relu_(),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.unbind(),
        lambda x: x.detach(),
        lambda x: x.copy_(x + 1),
        lambda x: F.dropout(x, 0.5, training=True, inplace=True),
    ],
)
def test_somebody_elses_tensor_is_not_counted(look: Callable[[Tensor], object]) -> None:
    """A tensor from elsewhere does not count on this device when it is read or written."""
    x = torch.ones(10, 10)
    with metered() as meter:
        kept = look(x)
        assert kept is not None
        assert meter.total == 0


def test_every_result_of_an_operation_counts() -> None:
    """Results in tuples and lists count; an output argument does not count twice."""
    with metered() as meter:
        x = torch.empty(8, 4)
        values, indices = x.topk(2)
        assert meter.total == 8 * 4 * 4 + 8 * 2 * (4 + 8)
        torch.add(values, 1, out=values)
        copies = torch._foreach_add([x, values], 1.0)
        assert meter.total == 2 * (8 * 4 * 4 + 8 * 2 * 4) + 8 * 2 * 8
        del indices, copies
        assert meter.total == 8 * 4 * 4 + 8 * 2 * 4


def test_a_tensor_made_from_numbers_counts() -> None:
    """`torch.tensor` of Python numbers counts as a new tensor."""
    with metered() as meter:
        x = torch.tensor([1.0, 2.0, 3.0])
        assert meter.total == x.nbytes == 12


def test_a_resized_tensor_counts_what_it_holds_now() -> None:
    """A storage that grows in place counts with its new size until it dies."""
    with metered() as meter:
        x = torch.empty(10)
        x.resize_(100)
        assert meter.total == 400
        del x
        assert meter.total == 0


def test_a_tensor_that_autograd_saved_counts_until_the_backward() -> None:
    """A tensor saved by autograd counts until the backward: the output of exp lives on in its node."""
    x = torch.ones(100, requires_grad=True)
    with metered() as meter:
        y = x.exp().sum()
        assert meter.total == 400 + 4
        y.backward()
        del y
        assert meter.total == 400  # the gradient
        x.grad = None
        assert meter.total == 0


def test_the_number_in_a_product_is_kept_for_the_backward() -> None:
    """`x * 3.0` saves its number, eight bytes, until its backward has run."""
    x = torch.ones(100, requires_grad=True)
    with metered() as meter:
        y = x * 3.0
        assert meter.total == 400 + 8
        y.backward(torch.ones(100))
        meter.begin("next")
        del y
        x.grad = None
        assert meter.total == 0


def test_a_product_without_a_graph_leaves_kept_numbers_alone() -> None:
    """A product without a graph does not count as the backward of an equal one: the saved number stays until
    its own backward.
    """
    x = torch.ones(2, requires_grad=True)
    with metered() as meter:
        y = (x * 3.0).sum()
        held = meter.total
        with torch.no_grad():
            x.detach() * 3.0
            x * 3.0
        meter.begin("2N1")
        assert meter.total == held
        y.backward()
        meter.begin("2B0")
        del y
        assert meter.total == x.grad.nbytes


def test_a_graph_that_is_dropped_keeps_no_numbers() -> None:
    """Without a backward, the numbers that graphs saved are freed with their nodes, however long the product."""
    x = torch.ones(100, requires_grad=True)
    with metered() as meter:
        y = [x * 3.0, (x / 7.0).sum()]
        y.clear()
        assert meter.total == 0


def test_a_retained_graph_keeps_its_numbers() -> None:
    """Numbers stay for a second backward, and for a backward through the first one, which shares them."""
    x = torch.ones(100, requires_grad=True)
    with metered() as meter:
        y = (x * 3.0).sum()
        (gradient,) = torch.autograd.grad(y, x, retain_graph=True)
        del gradient
        meter.begin("retained")
        assert meter.total == 4 + 8
        z = ((x * x) * 3.0).sum()
        (gradient,) = torch.autograd.grad(z, x, create_graph=True)
        del z
        meter.begin("recorded")
        held = meter.total
        y.backward()
        del y
        x.grad = None
        meter.begin("without the first one")
        assert held - meter.total == 4 + 8
        gradient.sum().backward()
        del gradient
        x.grad = None
        meter.begin("next")
        assert meter.total == 0


def test_a_product_in_place_keeps_its_number() -> None:
    """The number of a product in a part of a tensor is kept by the node of the whole tensor."""
    x = torch.ones(100, requires_grad=True)
    with metered() as meter:
        y = x + x
        y[:50].mul_(3.0)
        y.sum().backward()
        meter.begin("next")
        assert meter.total == 400 + 400


def test_the_peak_is_of_the_action() -> None:
    """An action's peak is its highest level, even if it is gone at the end; the next action starts at the
    end's level.
    """
    with metered() as meter:
        x = torch.empty(100)
        y = torch.empty(1000)
        del y
        assert meter.end(0, 0.0).total_bytes == 4400
        meter.begin("2F1")
        assert meter.end(0, 0.0).total_bytes == 400
        del x


def test_what_a_kernel_takes_inside_counts_for_the_peak_alone() -> None:
    """A workspace counts for the peak alone: a kernel of 2000 bytes, 1200 of them results, has 800 bytes of
    workspace, freed after it.
    """
    x = torch.rand(100)
    operation = "aten.sort.default(float32[100])"
    for given, inside in (
        (KernelMemory(kernels=(Kernel(operation=operation, peak_bytes=2000),)), 800),
        (None, 0),
    ):
        meter = Meter(3, kernels=Kernels(1, given) if given else None)
        meter.begin("2F0")
        with meter:
            kept = x.sort()
            assert meter.total == 1200
        sample = meter.end(0, 0.0)
        assert sample.total_bytes == 1200 + inside
        assert sample.by_category.get(Category.WORKSPACE, 0) == inside
        del kept


def test_what_is_left_takes_the_actions_category() -> None:
    """Tensors left by an action are in its category, tagged ones in their own; the peak's parts add up."""
    with metered() as meter:
        left, tagged = torch.empty(10), torch.empty(20)
        meter.tag([tagged, None], Category.BOUNDARY)
        meter.end(0, 0.0, Category.ACTIVATIONS)
        meter.begin("2B0")
        made = torch.empty(5)
        sample = meter.end(1, 0.5, Category.GRADIENTS)
    assert sample.by_category == {Category.ACTIVATIONS: 40, Category.BOUNDARY: 80, Category.TEMPORARY: 20}
    assert (sample.step, sample.action, sample.seconds) == (1, "2B0", 0.5)
    assert [t.nbytes for t in (left, tagged, made)] == [40, 80, 20]


def test_a_tag_makes_an_older_tensor_count() -> None:
    """A tag counts tensors older than the meter, such as parameters, once, even if repeated."""
    x = torch.empty(10)
    meter = metered()
    meter.tag([x, x.view(2, 5)], Category.PARAMETERS)
    meter.tag([x], Category.PARAMETERS)
    assert meter.total == 40
    meter.begin("next")
    assert meter.end(0, 0.0).by_category == {Category.PARAMETERS: 40}
    del x
    assert meter.total == 0


def test_the_cap_is_the_last_byte_that_fits() -> None:
    """A level equal to the cap passes; one byte more raises as CUDA does, with device, action, excess and
    holders.
    """
    with metered(cap_bytes=4096) as meter:
        parameters = torch.empty(512)
        meter.tag([parameters], Category.PARAMETERS)
        fits = torch.empty(512)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(1, dtype=torch.uint8)
    message = str(caught.value)
    assert "device 3 ran out of memory at 2F0" in message
    assert "1 B over its 4.00 KiB" in message
    assert "parameters 2.00 KiB" in message
    assert fits.nbytes == 2048


def test_a_kernels_inside_can_pass_the_cap() -> None:
    """A workspace freed within its operation counts against the cap."""
    x = torch.rand(100)
    known = KernelMemory(kernels=(Kernel(operation="aten.sort.default(float32[100])", peak_bytes=2000),))
    for cap, fits in ((1999, False), (2000, True)):
        meter = Meter(3, kernels=Kernels(1, known), cap_bytes=cap)
        meter.begin("2F0")
        with meter, nullcontext() if fits else pytest.raises(torch.OutOfMemoryError, match="workspace 800 B"):
            x.sort()


def test_a_refused_tensor_does_not_stay() -> None:
    """A tensor above the cap does not stay: the level is as before."""
    with metered(cap_bytes=1000) as meter:
        x = torch.empty(100)
        try:
            torch.empty(1000)
        except torch.OutOfMemoryError:
            refused = True
        gc.collect()
        assert refused
        assert meter.total == x.nbytes


def test_fake_tensors_weigh_what_real_ones_do() -> None:
    """Operation by operation, the levels over fake tensors are those over real ones."""

    def levels() -> list[int]:
        found = []
        with metered(kernels=True) as meter:
            x = torch.ones(8, 8, requires_grad=True)
            weight = torch.ones(8, 8, requires_grad=True)
            for call in (
                lambda: F.dropout(F.relu(x @ weight), 0.5).mul_(2.0).sum(),
                lambda: F.mse_loss(F.gelu(x) * 2.0, weight.detach()),
                lambda: F.cross_entropy(F.layer_norm(x @ weight, (8,)), torch.arange(8)),
                lambda: F.binary_cross_entropy((x / 3.0).sigmoid(), weight.detach()),
            ):
                loss = call()
                found.append(meter.total)
                loss.backward()
                meter.begin("next")
                found += [meter.total, meter.end(0, 0.0).total_bytes]
        return found

    real = levels()
    with FakeTarget("cpu"):
        assert levels() == real


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_numbers_that_a_recomputation_keeps(use_reentrant: bool) -> None:
    """The numbers of a recomputed graph are freed before the backward goes on, and nothing is left."""
    x = torch.ones(4, requires_grad=True)
    meter = Meter(0)
    with meter:
        for _ in range(2):
            checkpoint(lambda v: (v * 2.0).exp() * 3.0, x, use_reentrant=use_reentrant).sum().backward()
            x.grad = None
        meter.begin("after")
    assert meter.total == 0
