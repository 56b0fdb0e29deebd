"""The keeper: brings parts of models into a rank's memory before something needs them, and puts others away,
as it was planned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rlflow.compiler.residency_schedule import MemorySchedule, MemoryStep, ModelPart, Parts
from rlflow.errors import PlanError


class Half(Protocol):
    """A trainer or a generator."""

    def sleep(self, *parts: str) -> None:
        """Put these parts away."""

    def wake(self, *parts: str) -> None:
        """Bring these parts back."""


class MemoryMover:
    """Moves parts of models out of the memory of one process and back, as a schedule says. Without a
    schedule, or with one in which everything fits, nothing ever moves.

    Calls follow the schedule of an iteration; between two iterations, or where a rank had no rows, a call may
    come out of turn. It then gets what the next step of its kind has, and the schedule goes on from there:
    only differences are moved, so that an iteration takes the moves that were planned, and none of them ever
    exceeds the limit."""

    def __init__(self, course: MemorySchedule | None = None) -> None:
        self.course = course if course is not None and course.moving else None
        self.there: set[ModelPart] = set()
        self._halves: dict[tuple[str, str], Half] = {}
        self._at = 0
        self._moves = self._bytes = 0

    @staticmethod
    def of(courses: Iterable[MemorySchedule]) -> MemoryMover:
        """The mover of a run in one process, which has one schedule at most."""
        return MemoryMover(next(iter(courses), None))

    def loaded(self, role: str, half: str, model: Half) -> None:
        """A half of a role is there: what of it can be elsewhere goes until something needs it. Raises
        PlanError where there is no room."""
        own = [
            part
            for part in (self.course.sizes if self.course else ())
            if (part.role, part.half) == (role, half)
        ]
        if own:
            self._halves[role, half] = model
            try:
                model.sleep(*(part.what for part in own))
            except OSError as error:
                raise PlanError.of(
                    "memory-away",
                    f"what the {half} of role '{role}' holds cannot be put away",
                    found=str(error),
                    expected="room for all that is not in memory at once",
                    remedy="TMPDIR=FOLDER with room, or leave --memory out",
                ) from error

    def settle(self, needs: Parts) -> None:
        """Before a call: these parts are in memory, and there is room for what is there just during the call.
        Calls that work with models come one at a time."""
        course = self.course
        if course is None or not needs & {*course.sizes, *self._passing(course)}:
            return
        target = self._target(course, needs)
        self._move(course, self.there - target, away=True)
        self._move(course, target - self.there, away=False)

    def told(self) -> dict[str, float]:
        """Moves and their bytes since the last call, as metrics; nothing where nothing ever moves."""
        if self.course is None:
            return {}
        metrics = {"residency/moves": float(self._moves), "residency/bytes": float(self._bytes)}
        self._moves = self._bytes = 0
        return metrics

    def _passing(self, course: MemorySchedule) -> set[ModelPart]:
        return {part for moment in (*course.moments, *course.beside) for part in moment.passing}

    def _target(self, course: MemorySchedule, needs: Parts) -> set[ModelPart]:
        movable, passing = needs & course.sizes.keys(), needs & self._passing(course)
        count = len(course.moments)
        for step in range(count):
            at = (self._at + step) % count
            moment = course.moments[at]
            if moment.needs == movable and set(moment.passing) == passing:
                self._at = at
                return set(course.awake[at])
        return self._beside(
            course,
            next((moment for moment in course.beside if moment.needs == movable), MemoryStep("", movable)),
        )

    def _beside(self, course: MemorySchedule, moment: MemoryStep) -> set[ModelPart]:
        """The parts to keep for work outside an iteration: those that it needs, and of the others those that
        are there and fit, the next to be used first."""
        target = set(moment.needs)
        for part in sorted(self.there - target, key=lambda part: (self._next(course, part), part)):
            if course.held(moment, {*target, part}) <= course.limit:
                target.add(part)
        return target

    def _next(self, course: MemorySchedule, part: ModelPart) -> int:
        """How many moments on a part is needed."""
        count = len(course.moments)
        return next(
            (step for step in range(count) if part in course.moments[(self._at + step) % count].needs), count
        )

    def _move(self, course: MemorySchedule, parts: set[ModelPart], away: bool) -> None:
        for role, half in sorted({(part.role, part.half) for part in parts}):
            own = sorted(part for part in parts if (part.role, part.half) == (role, half))
            one = self._halves[role, half]
            (one.sleep if away else one.wake)(*(part.what for part in own))
            self.there = self.there.difference(own) if away else self.there.union(own)
            self._moves += len(own)
            self._bytes += sum(course.sizes[part] for part in own)
