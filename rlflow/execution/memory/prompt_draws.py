"""Draws an iteration's prompts from all records, by weights that a table of the flow gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
import torch

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Kind, Level
from rlflow.author.stage import Stage
from rlflow.compiler.trace.compile import Program
from rlflow.compiler.trace.drawn_by import DrawnBy
from rlflow.data.prompts import Weigh
from rlflow.errors import StageError
from rlflow.execution.apply import apply_stage, failing
from rlflow.execution.memory.tables import KeptTable
from rlflow.training.threads import alone

NUMBER = Kind(Level.ROW, "float32")


class RecordCursor(Protocol):
    """The cursor over the data."""

    def draw(self, count: int, iteration: int, weigh: Weigh, by: str) -> Batch:
        """Return up to ``count`` records as rows, drawn by weight. See ``Prompts.draw``."""


@dataclass(frozen=True)
class PromptDraws:
    """Draws prompts by weight, for ``--prompts-by``."""

    records: RecordCursor
    by: DrawnBy
    stage: Stage | None = None  # computes the weights; None: they are a column of the table
    settings: Mapping[str, Any] | None = None  # of the stage

    @classmethod
    def of(cls, program: Program, records: RecordCursor) -> Self | None:
        """Return what draws the prompts of a program, or None if they come in the data's order."""
        by = program.drawn_by
        if by is None or by.stage is None:
            return cls(records, by) if by is not None else None
        return cls(records, by, program.stage(by.stage.name), program.settings[by.stage.name])

    def take(self, count: int, iteration: int, table: KeptTable) -> Batch:
        """Return up to ``count`` prompts of an iteration. ``table``: the table ``by.table``, as it reads it.

        Raises SkipIteration if no record has a weight above 0, and StageError if the weights can't be used.
        """
        weigh = partial(self.weights, table, iteration)
        return self.records.draw(count, iteration, weigh, str(self.by))

    def weights(self, table: KeptTable, iteration: int, numbers: np.ndarray) -> np.ndarray:
        """Return the weights of records, float64 [records].

        ``numbers``: the number of each record (``prompt_id``), int64 [records]. Raises StageError if a weight is
        negative or infinite.
        """
        columns = table.read(torch.from_numpy(numbers))
        data = columns[self.by.column] if self.stage is None else self._computed(columns, iteration)
        weights = data.double().numpy()
        wrong = np.flatnonzero((weights < 0) | np.isinf(weights))
        if wrong.size:
            raise self._unusable(iteration, int(numbers[wrong[0]]), float(weights[wrong[0]]), len(numbers))
        return weights

    def _computed(self, columns: Mapping[str, torch.Tensor], iteration: int) -> torch.Tensor:
        node, stage = self.by.stage, self.stage
        assert node is not None
        assert stage is not None
        rows = len(next(iter(columns.values())))
        batch = Batch(
            Axis.fresh(rows), {name: Data(NUMBER, columns[column]) for name, column in self.by.columns}
        )
        with failing(node.name, iteration, batch, node.place), alone():
            result, _ = apply_stage(stage, batch, self.settings or {}, 0)
            kind = result.data[self.by.column].kind
            if kind.level is not Level.ROW:
                raise ValueError(f"column '{self.by.name}': found {kind}, expected a number per row")
        weights: torch.Tensor = result[self.by.column]
        return weights

    def _unusable(self, iteration: int, number: int, weight: float, records: int) -> StageError:
        node = self.by.stage
        return StageError(
            node.name if node else "",
            iteration,
            records,
            f"record {number} of the data has the weight {weight:g} (--prompts-by {self.by}), expected a finite "
            "number, 0 or more; 0 and NaN are never drawn",
            node.place if node else None,
            lines=(f"stage '{self.stage.name}' at {self.stage.place}",) if self.stage else (),
        )
