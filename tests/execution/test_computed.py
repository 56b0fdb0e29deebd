"""Computed numbers as settings, and their ranges."""

from typing import Annotated

import pytest
import torch
from annotated_types import Gt, Le

from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Kind, Level
from rlflow.author.signature import read
from rlflow.execution.computed import as_numbers, with_numbers


def bounded(
    scores,
    *,
    plain,
    share: Annotated[float, Gt(0), Le(1)] = 0.5,
    maybe: float | None = None,
    count: int = 1,
    small=2,
):
    return scores


SIGNATURE = read(bounded)


def batch(**numbers):
    columns = {
        f"setting.{name}": Data(Kind(Level.SCALAR, "float32"), torch.tensor(value))
        for name, value in numbers.items()
    }
    rows = Batch.of(scores=torch.zeros(2))
    return Batch(rows.axis, rows.data | columns)


def test_computed_numbers_move_from_the_batch_to_the_settings():
    settings, rows = with_numbers({"count": 3}, batch(share=0.25, plain=-7.0), SIGNATURE)
    assert settings == {"count": 3, "share": 0.25, "plain": -7.0}
    assert list(rows.columns) == ["scores"]
    same = batch()
    assert with_numbers({"count": 3}, same, SIGNATURE) == ({"count": 3}, same)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("share", 0.0, r"setting 'share': found 0, expected float > 0 and <= 1"),
        ("share", 1.5, "found 1.5"),
        ("share", float("nan"), "expected a finite number"),
        ("plain", float("inf"), "expected a finite number"),
    ],
)
def test_a_number_out_of_its_annotated_range_is_refused(name, value, says):
    with pytest.raises(ValueError, match=says):
        with_numbers({}, batch(**{name: value}), SIGNATURE)
    with pytest.raises(ValueError, match=says):
        as_numbers({name: torch.tensor(value)}, SIGNATURE.takes_float, SIGNATURE)


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [("temperature", 0.0, True), ("temperature", -1.0, False), ("top_p", 1.0, True), ("top_p", 0.0, False)],
)
def test_a_computed_setting_of_generate_has_the_usual_range(name, value, fits):
    if fits:
        assert with_numbers({}, batch(**{name: value}), None)[0] == {name: value}
    else:
        with pytest.raises(ValueError, match=f"setting '{name}'"):
            with_numbers({}, batch(**{name: value}), None)


def test_a_setting_takes_a_column_if_it_may_be_a_float():
    assert [name for name in SIGNATURE.settings if SIGNATURE.takes_float(name)] == ["plain", "share", "maybe"]


def test_eager_calls_turn_only_single_numbers_into_settings():
    values = {"share": torch.tensor(0.5), "plain": torch.tensor([1.0, 2.0]), "count": torch.tensor(2)}
    numbers = as_numbers(values, SIGNATURE.takes_float, SIGNATURE)
    assert numbers["share"] == 0.5
    assert numbers["plain"] is values["plain"]
    assert numbers["count"] is values["count"]
