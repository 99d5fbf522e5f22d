"""Rules by operator. An operator without a rule is replicated, which is always correct and saves nothing."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from pipefit.capture import operator_name
from pipefit.tensor_parallel.operations import Rule
from pipefit.tensor_parallel.rules import elementwise, products, reshaping, vocabulary

RULES: Mapping[str, Rule] = {
    "linear": products.linear,
    "addmm": products.addmm,
    "mm": products.mm,
    "matmul": products.matmul,
    "bmm": products.matmul,
    "baddbmm": products.baddbmm,
    "_grouped_mm": products.grouped_mm,
    "grouped_mm_fallback": products.grouped_mm,
    "scaled_dot_product_attention": products.attention,
    "einsum": products.einsum,
    "embedding": vocabulary.embedding,
    "cross_entropy_loss": vocabulary.cross_entropy,
    "dropout": products.dropout,
    "layer_norm": elementwise.over_features,
    "rms_norm": elementwise.over_features,
    "batch_norm": elementwise.over_channels,
    "instance_norm": elementwise.over_channels,
    "group_norm": elementwise.over_groups,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), products.convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), products.transposed),
    **dict.fromkeys(products.CHANNELWISE, products.channelwise),
    **dict.fromkeys(elementwise.ALONG, elementwise.along),
    **dict.fromkeys(reshaping.VIEWS, reshaping.view),
    **dict.fromkeys(("transpose", "permute", "t", "numpy_T", "mT"), reshaping.transpose),
    "expand": reshaping.expand,
    "repeat": reshaping.repeat,
    "repeat_interleave": reshaping.repeat_interleave,
    **dict.fromkeys(reshaping.CUTS, reshaping.cut),
    "select": reshaping.select,
    "slice": reshaping.slice_,
    "cat": reshaping.cat,
    "stack": reshaping.stack,
    "pad": reshaping.pad,
    "constant_pad_nd": reshaping.pad,
    "index": reshaping.index,
    "glu": reshaping.glu,
    "roll": reshaping.roll,
}


def rule_of(node: fx.Node) -> Rule | None:
    """Return the rule for an operation; None if there is none."""
    if node.target is operator.getitem:
        return reshaping.item
    named = RULES.get(operator_name(node))
    return named or (elementwise.pointwise if elementwise.is_pointwise(node) else None)
