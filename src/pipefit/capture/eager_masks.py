"""Hugging Face models traced as they run eagerly: without attention masks that mask nothing.

When it is traced, transformers builds an attention mask of sequence x sequence even where every token may see all, or
all before it; when it runs eagerly it leaves the mask out and attention takes its fast path. A captured model should
compute, and hold, what the eager one does. Where no padding mask is given, that is known without looking at any values;
where no positions are given, the sequences are known not to be packed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

_MASKS = "transformers.masking_utils"


@contextmanager
def eager_masks(inputs: Mapping[str, Any]) -> Iterator[None]:
    """A context in which a transformers model that is given `inputs` builds the masks it would build eagerly."""
    masks = sys.modules.get(_MASKS)
    with ExitStack() as patches:
        if masks is not None and hasattr(masks, "is_torchdynamo_exporting"):
            patches.enter_context(mock.patch.object(masks, "is_torchdynamo_exporting", return_value=False))
        if inputs.get("position_ids") is None and hasattr(masks, "find_packed_sequence_indices"):
            patches.enter_context(mock.patch.object(masks, "find_packed_sequence_indices", return_value=None))
        yield
