"""The parts inside transformers that the backends use or replace. transformers does not document them, or may
change them between releases.

No other file of the backends names them. `rlflow.training.pretrained.refuse_folder_code` uses one more, and
does not load this module, which loads transformers' models. `tests/backends/test_transformers_internals.py`
fails if a release of transformers changes a part.
"""

from transformers import modeling_utils  # its `unwrap_model` is replaced while a model is saved
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "ALL_MASK_ATTENTION_FUNCTIONS",
    "Cache",
    "Conv1D",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "GradientCheckpointingLayer",
    "causal_mask_function",
    "modeling_utils",
    "sdpa_mask",
]
