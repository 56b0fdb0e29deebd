"""The transformers internals that the backends use or replace. They are undocumented or may change between
releases.

No other file of the backends names them. `rlflow.training.pretrained.refuse_folder_code` uses one more, but
doesn't import this module, because that would load transformers' models.
`tests/backends/test_transformers_internals.py` fails if a transformers release changes one of these
internals.
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
    "CACHE_ARGUMENTS",
    "Cache",
    "Conv1D",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "GradientCheckpointingLayer",
    "causal_mask_function",
    "modeling_utils",
    "sdpa_mask",
]

# the argument of a model's forward for its key-value cache: "cache" since transformers 5.20
CACHE_ARGUMENTS = ("past_key_values", "cache")
