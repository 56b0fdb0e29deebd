"""The digest depends on every bit and its position, and not on the layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import bits_of, layouts, part, strided

from rlflow.training.weight_sync.boxes import whole
from rlflow.training.weight_sync.verify import coefficients, digest, wrapped

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(st.data(), shapes, st.integers(1, 6), st.sampled_from(("float32", "bfloat16", "float64", "float16")))
def test_terms_of_any_layout_add_up_to_the_digest(data, shape, ranks, dtype):
    values = bits_of(shape, dtype, 0)
    layout, _ = data.draw(layouts({"x": shape}, ranks))
    terms = [
        digest(strided(part(values, box), i), box) for i, box in enumerate(layout.tensors["x"].holders())
    ]
    assert wrapped(sum(terms)) == digest(values, whole(shape))


def test_rows_in_several_passes_have_the_digest_of_one_pass():
    values = bits_of((3000, 300), "bfloat16", 1)
    sides = [digest(values[:1234], ((0, 1234), (0, 300))), digest(values[1234:], ((1234, 3000), (0, 300)))]
    assert wrapped(sum(sides)) == digest(values, whole(values.shape))
    exact = sum(
        int(v) * int(a) * int(b)
        for row, a in zip(values[:5, :7].view(torch.int16).tolist(), coefficients(0, 8), strict=False)
        for v, b in zip(row, coefficients(1, 8), strict=False)
    )
    assert wrapped(exact) == digest(values[:5, :7], ((0, 5), (0, 7)))


@pytest.mark.parametrize("change", ["rows", "columns", "elements", "bit", "sign of zero"])
def test_changed_bits_or_positions_change_the_digest(change):
    values = bits_of((16, 12), "bfloat16", 2)
    values[3, 4] = 0.0
    before, changed = digest(values, whole(values.shape)), values.clone()
    if change == "rows":
        changed[[2, 9]] = changed[[9, 2]]
    elif change == "columns":
        changed[:, [0, 11]] = changed[:, [11, 0]]
    elif change == "elements":
        changed[1, 2], changed[2, 1] = values[2, 1], values[1, 2]
    elif change == "bit":
        changed.view(torch.int16)[15, 11] ^= 1
    else:
        changed[3, 4] = -0.0
    assert digest(changed, whole(values.shape)) != before


def test_the_same_bits_at_another_position_have_another_digest():
    row = bits_of((1, 8), "float32", 3)
    assert digest(row, ((0, 1), (0, 8))) != digest(row, ((1, 2), (0, 8)))
