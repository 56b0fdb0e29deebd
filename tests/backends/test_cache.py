"""The cache that grows in place has the contents of the cache in transformers."""

import torch
from transformers.cache_utils import DynamicLayer

from rlflow.backends.local.cache import GrowingLayer


def test_the_cache_matches_while_it_grows_and_rows_leave():
    own, plain = GrowingLayer(), DynamicLayer()
    random = torch.Generator().manual_seed(0)
    rows = 5
    for step in range(300):  # outgrows its buffer several times, also after rows left
        if step in (10, 290):
            index = torch.arange(0, rows, 2) if step == 290 else torch.tensor([3, 3, 0, 1])
            own.reorder_cache(index)
            plain.reorder_cache(index)
            rows = len(index)
        new = torch.randn(2, rows, 2, 7 if step == 0 else 1, 4, generator=random)
        shown, expected = own.update(*new), plain.update(*new)
        assert all(torch.equal(a, b) for a, b in zip(shown, expected, strict=True))
        assert own.get_seq_length() == plain.get_seq_length() == step + 7
