"""Attention masks that transformers makes without looking at the padding.

Before each pass transformers asks whether a padding mask hides anything at all, so that it can leave it out, and the host waits for the
answer. A decode loop knows it: it gives a mask where there is padding, and none where there is none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from transformers import masking_utils

from rlflow.author.scope import with_value
from rlflow.backends.local.attention import PackedMask, mask_of_packed
from rlflow.backends.local.branches import StepMask, mask_of_step

_KNOWN = ContextVar("known", default=False)


def known() -> AbstractContextManager[None]:
    """A time in which each padding mask that is given hides something."""
    return with_value(_KNOWN, True)


def _sdpa_mask(
    *args: Any, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, use_vmap: bool = False, **options: Any
) -> Tensor | PackedMask | StepMask | None:
    """transformers' own; outside of ``known``, and where no rows are packed or branched, nothing is different."""
    visible = options.get("mask_function", masking_utils.causal_mask_function)
    if (packed := mask_of_packed(options.get("local_size"), visible, use_vmap)) is not None:
        return packed
    if (step := mask_of_step(options.get("local_size"), visible, use_vmap)) is not None:
        return step
    look = attention_mask is None or not _KNOWN.get()
    return masking_utils.sdpa_mask(*args, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip and look,
                                   use_vmap=use_vmap, **options)  # fmt: skip


masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = _sdpa_mask
