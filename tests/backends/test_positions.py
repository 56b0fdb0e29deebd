"""Masks of a model that depend only on positions, and layers whose mask hides nothing."""

import pytest
from transformers import masking_utils

from rlflow.backends.local.positions import by_positions

CAUSAL, WINDOW = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(8)


def test_a_mask_is_used_if_a_row_exceeds_the_window():
    assert by_positions(CAUSAL, None, 1000, False) is None
    assert by_positions(WINDOW, 8, 8, False) is None
    assert by_positions(WINDOW, 8, 9, False) is WINDOW
    assert by_positions(WINDOW, None, 4, False) is WINDOW


def test_a_mask_that_depends_on_more_than_positions_is_refused():
    with pytest.raises(ValueError, match="its own mask"):
        by_positions(CAUSAL, None, 4, True)
