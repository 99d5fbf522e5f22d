"""Rules by operator. An operator without a rule is replicated, which is always correct and saves nothing."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from pipefit.capture.flat import operator_name
from pipefit.tensor_parallel.operations import Rule
from pipefit.tensor_parallel.rules import attention, elementwise, products, reshaping, vocabulary
from pipefit.tensor_parallel.rules import attention as random
from pipefit.tensor_parallel.rules import products as convolutions
from pipefit.tensor_parallel.rules import products as sums
from pipefit.tensor_parallel.rules import reshaping as pieces

RULES: Mapping[str, Rule] = {
    "linear": products.linear,
    "addmm": products.addmm,
    "mm": products.mm,
    "matmul": products.matmul,
    "bmm": products.matmul,
    "baddbmm": products.baddbmm,
    "_grouped_mm": products.grouped_mm,
    "grouped_mm_fallback": products.grouped_mm,
    "scaled_dot_product_attention": attention.attention,
    "einsum": sums.einsum,
    "embedding": vocabulary.embedding,
    "cross_entropy_loss": vocabulary.cross_entropy,
    "dropout": random.dropout,
    "layer_norm": elementwise.over_features,
    "rms_norm": elementwise.over_features,
    "batch_norm": elementwise.over_channels,
    "instance_norm": elementwise.over_channels,
    "group_norm": elementwise.over_groups,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolutions.convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), convolutions.transposed),
    **dict.fromkeys(convolutions.CHANNELWISE, convolutions.channelwise),
    **dict.fromkeys(elementwise.ALONG, elementwise.along),
    **dict.fromkeys(reshaping.VIEWS, reshaping.view),
    **dict.fromkeys(("transpose", "permute", "t", "numpy_T", "mT"), reshaping.transpose),
    "expand": reshaping.expand,
    "repeat": reshaping.repeat,
    "repeat_interleave": reshaping.repeat_interleave,
    **dict.fromkeys(pieces.CUTS, pieces.cut),
    "select": pieces.select,
    "slice": pieces.slice_,
    "cat": pieces.cat,
    "stack": pieces.stack,
    "pad": pieces.pad,
    "constant_pad_nd": pieces.pad,
    "index": pieces.index,
    "glu": pieces.glu,
    "roll": pieces.roll,
}


def rule_of(node: fx.Node) -> Rule | None:
    """Return the rule for an operation; None if there is none."""
    if node.target is operator.getitem:
        return pieces.item
    named = RULES.get(operator_name(node))
    return named or (elementwise.pointwise if elementwise.is_pointwise(node) else None)
