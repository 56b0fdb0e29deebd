"""Figures, which identify the numbers that a run logs.

rlflow always looks up a number by its figure, and never parses its logged name.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Of(StrEnum):
    """What a logged number is about."""

    STAGE = "stage"  # a stage
    NODE = "node"  # a `repeat`, a `choose` or an `ask`
    UPDATE = "update"  # an update of a role
    REWARD = "reward"  # scores of a reward role; if ``part`` is set, scores of the reward with that name
    MISSING = "missing"  # a cause of missing rewards of a role
    LOGGED = "logged"  # a number that a reward returns next to its scores, or that an environment logs
    SCORES = "scores"  # scores of the iteration; if ``part`` is set, scores of the reward role with that name
    ROWS = "rows"  # the rows of the iteration
    SOURCE = "source"  # the scores of the rows of one data source
    WEIGHT_CHECK = "canary"  # weight check: fixed tokens that the trainer and the generator of a role score
    ROW_OUTCOME = "fate"  # outcomes of sampled rows
    LEFT_OUT = "left out"  # a reason why records in the data are skipped
    STATE = "state"  # a scalar of the flow that keeps its value from one iteration to the next
    RUN = "run"  # the full iteration
    EVALUATION = "evaluation"  # prompts held out from the data; ``part`` is the data source
    SET = "set"  # a held-out set; ``part`` is its name


class Figure(NamedTuple):
    """The identity of a logged number: its quantity and its origin.

    Metrics returned by a single node leave ``node`` and ``role`` empty; they are filled in when logged.
    """

    of: Of
    name: str
    node: str = ""  # the node that measures it
    role: str = ""  # for measurements of rows: set only if several trained roles sample
    part: str = ""  # one of several rewards or reward roles, a data source or a held-out set

    @property
    def key(self) -> str:
        """The number's name in metrics.jsonl, unless several figures have the same key."""
        match self.of:
            case Of.STAGE | Of.NODE | Of.UPDATE:
                return f"{self.node}/{self.name}"
            case Of.MISSING:
                return f"{self.node}/missing_{Cause(self.name, self.part)}"
            case Of.REWARD | Of.LOGGED if self.node:
                return f"{self.node}/{f'{self.part}_' * bool(self.part)}{self.name}"
            case Of.ROW_OUTCOME:
                return f"fates/{self.name.replace(' ', '_')}"
            case Of.WEIGHT_CHECK:
                return f"canary/{self.role}_{self.name}"
            case Of.EVALUATION:
                return "/".join(filter(None, ("evaluation", self.role, self.name, self.part)))
            case Of.SET:
                return "/".join(filter(None, ("evaluation", self.part, self.role, self.name)))
        head = f"{self.part or 'reward'}/" if self.of is Of.SCORES else HEADS.get(self.of, "")
        return f"{f'{self.role}/' * bool(self.role)}{head}{self.name}"


HEADS = {Of.LOGGED: "env/", Of.SOURCE: "scores/", Of.LEFT_OUT: "data/left_out_"}


class Cause(NamedTuple):
    """Why a reward is missing.

    ``reward`` is the name of the reward, or empty if an environment's episode failed.
    """

    name: str
    reward: str = ""

    def __str__(self) -> str:
        return f"{self.reward}/{self.name}" if self.reward else f"env_{self.name}"


SECONDS = Figure(Of.RUN, "seconds")
SPEED = Figure(Of.RUN, "response/tokens_per_second")
# share of held-out answers that are right, sampled at temperature 1
HELD_OUT = Figure(Of.EVALUATION, "sampled")
SCORE = Figure(Of.EVALUATION, "score")  # mean score of the rows that a flow's own evaluation returns
