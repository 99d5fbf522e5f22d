"""The meter: peaks and spans above the start of a pass, and its work."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipefit.fake_cuda.target import FakeTarget
from pipefit.profiler import profile
from pipefit.profiler.pass_meter import PassMeter
from pipefit.schema.layer_costs import Alike, Span, Work
from pipefit.texts import dtype_name
from support.two_dtypes import adapted

KIB = 256  # floats in a KiB


def test_peaks_are_above_the_start_of_the_pass() -> None:
    """Memory allocated before a pass is excluded from its peak; memory freed again counts."""
    with PassMeter(None) as meter:
        before = torch.empty(4 * KIB)
        meter.start()
        x = torch.empty(2 * KIB)
        del x
        y = torch.empty(KIB)
        assert meter.peak_bytes == 2048
        meter.start()
        assert meter.peak_bytes == 0
        del before, y


def test_a_pass_is_cut_where_inputs_are_released() -> None:
    """Each span has its peak, as if all inputs were held, and the inputs freed before it."""
    with PassMeter(None) as meter:
        inputs = [torch.empty(KIB), torch.empty(2 * KIB), torch.empty(4 * KIB)]
        watched = meter.storages(inputs)
        meter.start(watched)
        kept = [torch.empty(KIB)]
        inputs[1] = kept[0]
        kept.append(torch.empty(4 * KIB))
        inputs[0] = kept[0]
        kept.append(torch.empty(8 * KIB))
        assert meter.spans == (
            Span(peak_bytes=1024),
            Span(peak_bytes=5 * 1024, released=(1,)),
            Span(peak_bytes=13 * 1024, released=(1, 0)),
        )


def test_outputs_and_their_gradients_may_stay() -> None:
    """A pass that releases an output or a gradient peaks higher by its bytes if somebody else holds it."""
    with PassMeter(None) as meter:
        gradients, outputs = [torch.empty(4 * KIB)], [torch.empty(8 * KIB)]
        meter.start((), meter.storages(gradients), meter.storages(outputs))
        kept = [torch.empty(KIB)]
        gradients.clear()
        kept.append(torch.empty(2 * KIB))
        outputs.clear()
        kept.append(torch.empty(KIB))
        assert meter.spans == (Span(peak_bytes=1024),)
        assert meter.engine_spans == (
            Span(peak_bytes=1024),
            Span(peak_bytes=-1024, used_bytes=4 * 1024),
            Span(peak_bytes=-8 * 1024, used_bytes=4 * 1024, returned_bytes=8 * 1024),
        )
        del kept


def test_a_span_no_higher_than_an_earlier_one_is_left_out() -> None:
    """After inputs are freed a lower level adds nothing: the peak before binds any other holder."""
    with PassMeter(None) as meter:
        inputs = [torch.empty(KIB)]
        meter.start(meter.storages(inputs))
        high = torch.empty(8 * KIB)
        del high
        inputs.clear()
        torch.empty(KIB)
        assert meter.spans == (Span(peak_bytes=8 * 1024),)


def test_an_input_that_was_gone_before_is_not_watched() -> None:
    """Storages freed before the pass began release nothing in it."""
    with PassMeter(None) as meter:
        inputs = [torch.empty(KIB), torch.empty(KIB)]
        watched = meter.storages(inputs)
        del inputs[0]
        meter.start(watched)
        del inputs[0]
        torch.empty(8 * KIB)
        assert meter.spans[-1].released == (1,)


def test_work_counts_products_and_bytes_moved() -> None:
    """A product of m x k and k x n is 2 m n k operations; operations move the bytes they read and write,
    views none.
    """
    with PassMeter(None) as meter:
        x, weight = torch.empty(3, 5), torch.empty(5, 7)
        meter.start()
        y = x.t().t() @ weight
        y.view(-1).add_(1.0)
        product, added = (
            Alike(1, 2 * 3 * 5 * 7, 4 * (15 + 35 + 21), "float32", "", (1, 3, 7, 5)),
            Alike(1, 0, 4 * (21 + 21), "float32"),
        )
        assert meter.work == Work(
            flops=2 * 3 * 5 * 7, moved_bytes=4 * (15 + 35 + 21) + 4 * (21 + 21), operations=(product, added)
        )
        meter.start()
        for _ in range(3):
            y.mul_(2.0)
        assert meter.work == Work.of([Alike(3, 0, 4 * (21 + 21), "float32")])
        meter.start()
        torch.empty_like(y)
        assert meter.work == Work(flops=0, moved_bytes=0)


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_multiply_once_for_the_result_and_for_each_gradient(
    groups: int, transposed: bool
) -> None:
    """A convolution has a product for every weight at every place of the smaller images, in every sample; so
    has each gradient, whatever the groups.
    """
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(8, 16, 3, 2, groups=groups, bias=False)
    images = torch.empty(5, 8, 9, 9, requires_grad=True)
    with PassMeter(None) as meter:
        meter.start()
        result = layer(images)
        once = 2 * layer.weight.numel() * 5 * min(result.shape[-1], 9) ** 2
        assert meter.work.flops == once
        meter.start()
        result.backward(torch.empty_like(result))
        assert meter.work.flops == 2 * once


@pytest.mark.parametrize("causal", [False, True])
def test_causal_attention_computes_half_of_the_scores(causal: bool) -> None:
    """Two products in the forward and five in the backward, over all pairs of tokens or half of them."""
    with FakeTarget("cuda") as fake, PassMeter(None, fake.device) as meter:
        heads = [torch.empty(2, 3, 64, 16, dtype=torch.float16, device=fake.device) for _ in range(3)]
        meter.start()
        result = functional.scaled_dot_product_attention(
            *(each.requires_grad_() for each in heads), is_causal=causal
        )
        once = 2 * 2 * 3 * 64 * 64 * 16 // (1 + causal)
        assert meter.work.flops == 2 * once
        meter.start()
        result.backward(torch.empty_like(result))
        assert meter.work.flops == 5 * once


def passes(
    samples: int, layout: torch.memory_format = torch.contiguous_format, **settings: int
) -> list[tuple[Alike, ...]]:
    """Return the operations of a convolution's forward and backward, from 8 channels to 16."""
    with FakeTarget("cuda") as fake, PassMeter(None, fake.device) as meter:
        layer = nn.Conv2d(8, 16, bias=False, **settings).to(fake.device, memory_format=layout)  # type: ignore[arg-type]
        images = torch.empty(samples, 8, 9, 9, device=fake.device).contiguous(memory_format=layout)
        meter.start()
        result = layer(images.requires_grad_())
        forward = meter.work.operations
        meter.start()
        result.backward(torch.empty_like(result))
        return [forward, meter.work.operations]


@pytest.mark.parametrize("last", [False, True])
def test_images_in_another_layout_than_channels_last_are_converted(last: bool) -> None:
    """Tensor cores read and write images and results of a convolution once more, and so for each gradient."""
    layout = torch.channels_last if last else torch.contiguous_format
    forward, backward = passes(5, layout, kernel_size=3, padding=1)
    assert {alike.family for alike in forward if alike.flops} == {"winograd"}
    moved = [sum(a.moved_bytes for a in work if a.family == "layout") for work in (forward, backward)]
    both = 2 * 4 * (8 + 16) * 5 * 81
    assert moved == ([0, 0] if last else [both, 2 * both])


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_depthwise_kernels_read_images_as_they_are(groups: int) -> None:
    """A convolution of every channel by itself converts no layout, and has two operations for each of its taps."""
    forward, backward = passes(3, kernel_size=5, stride=2, groups=groups)
    taps = 25 * (8 // groups) * 3 * 16 * 9
    kernels = {"depthwise"} if groups == 8 else {"convolution", "layout"}
    assert {alike.family for alike in (*forward, *backward)} - {""} == kernels
    assert [sum(alike.flops for alike in work) for work in (forward, backward)] == [2 * taps, 4 * taps]


@pytest.mark.parametrize("read", ["embedding", "index_select", "gather", "index"])
def test_rows_of_a_table_are_read_as_far_as_they_are_returned(read: str) -> None:
    """Looking up three rows of a thousand moves the indices, the rows read and the rows written."""
    table, rows = torch.randn(1000, 8), torch.tensor([1, 7, 9])
    with PassMeter(None) as meter:
        meter.start()
        match read:
            case "embedding":
                torch.nn.functional.embedding(rows, table)
            case "index_select":
                table.index_select(0, rows)
            case "gather":
                table.gather(0, rows[:, None])
            case "index":
                table[rows]
        returned = 4 * 3 * (1 if read == "gather" else 8)
        assert meter.work == Work.of([Alike(1, 0, 8 * 3 + 2 * returned, "float32")])


def test_dtypes_have_short_names() -> None:
    """`torch.float32` has the short name `float32`."""
    assert [dtype_name(dtype) for dtype in (torch.float32, torch.bool)] == ["float32", "bool"]


def test_matrix_products_have_sizes_and_others_have_none() -> None:
    """A linear layer and batches of matrices have matrices, rows, columns and terms, and a convolution is a product
    of its patches and kernels. An empty product has none, nor has a convolution of several groups.
    """
    with PassMeter(None) as meter:
        x, heads = torch.empty(2, 3, 5), torch.empty(4, 6, 8)
        meter.start()
        nn.Linear(5, 7)(x)
        torch.baddbmm(torch.empty(4, 6, 9), heads, torch.empty(4, 8, 9))
        torch.empty(0, 5) @ torch.empty(5, 7)
        nn.Conv2d(3, 4, 2, stride=2)(torch.empty(2, 3, 6, 8)).sum().backward()
        nn.Conv2d(4, 4, 2, groups=2)(torch.empty(2, 4, 6, 8))
        nn.Conv2d(0, 4, 2)(torch.empty(2, 0, 6, 8))
        found = [each.product for each in meter.work.operations if each.flops]
        empty = [each.product for each in meter.work.operations if not each.flops]
    convolution = (1, 2 * 3 * 4, 4, 3 * 2 * 2)
    assert found == [(1, 6, 7, 5), (4, 6, 9, 8), convolution, convolution, ()]
    assert set(empty) == {()}


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_products_are_timed_by_the_dtype_of_their_operands(adapters: torch.dtype) -> None:
    """In a frozen bfloat16 layer with two adapters the large products are bfloat16, and so is the model."""
    found = profile(adapted(adapters), microbatch_size=2)
    assert found.assumptions.precision == "bfloat16"
    flops = Counter[str]()
    for cost in found.at(2).costs:
        for alike in (*cost.forward.operations, *cost.backward.operations):
            if alike.flops:
                flops[alike.dtype] += alike.number * alike.flops
    of_base, of_adapters = 2 * 2 * 64 * 64, 2 * 2 * 64 * 4 * 2
    expected = Counter(
        {"bfloat16": 3 * of_base}
    )  # two forward, and one backward: the first input needs no gradient
    expected[str(adapters).removeprefix("torch.")] += 2 * 3 * of_adapters - of_adapters // 2
    assert flops == expected
