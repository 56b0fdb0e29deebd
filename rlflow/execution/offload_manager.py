"""Loads model parts before calls need them, and offloads others to make room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rlflow.compiler.residency_schedule import MemorySchedule, MemoryStep, ModelPart, Parts
from rlflow.errors import PlanError


class ModelSide(Protocol):
    """A trainer or a generator whose parts can be offloaded."""

    def sleep(self, *parts: str) -> None:
        """Offload these kinds of memory, such as "optimizer"."""

    def wake(self, *parts: str) -> None:
        """Load these kinds of memory again."""


class OffloadManager:
    """Moves model parts out of one process's memory and back again, following a memory schedule.

    If there is no schedule, or if everything fits, nothing moves. Calls normally follow the schedule of an
    iteration. After a call that is out of order, for example between two iterations, the manager continues at
    the schedule's next step that needs the same parts. It moves only parts that must change place, so an
    iteration makes exactly the planned moves, and memory never exceeds the limit.
    """

    def __init__(self, offload_plan: MemorySchedule | None = None) -> None:
        self.offload_plan = offload_plan if offload_plan is not None and offload_plan.moving else None
        self.in_memory: set[ModelPart] = set()
        self._sides: dict[tuple[str, str], ModelSide] = {}
        self._at = 0
        self._moves = self._bytes = 0

    @staticmethod
    def of(offload_plans: Iterable[MemorySchedule]) -> OffloadManager:
        """Return the offload manager of a single-process run.

        ``offload_plans``: at most one memory schedule.
        """
        return OffloadManager(next(iter(offload_plans), None))

    def loaded(self, role: str, half: str, model: ModelSide) -> None:
        """Register a trainer or generator (``half``) that was just loaded, and offload its movable parts.

        Raises PlanError if there is no room for them.
        """
        own = [
            part
            for part in (self.offload_plan.sizes if self.offload_plan else ())
            if (part.role, part.half) == (role, half)
        ]
        if own:
            self._sides[role, half] = model
            try:
                model.sleep(*(part.what for part in own))
            except OSError as error:
                raise PlanError.of(
                    "memory-away",
                    f"the {half} of role '{role}' cannot be offloaded",
                    found=str(error),
                    expected="disk space for all parts that are not in memory",
                    remedy="set TMPDIR to a folder with free space, or remove --memory",
                ) from error

    def settle(self, needs: Parts) -> None:
        """Load the model parts that a call needs, and offload other parts to make room for it.

        Calls that use models must run one at a time.
        """
        offload_plan = self.offload_plan
        if offload_plan is None or not needs & {*offload_plan.sizes, *self._passing(offload_plan)}:
            return
        target = self._target(offload_plan, needs)
        self._move(offload_plan, self.in_memory - target, away=True)
        self._move(offload_plan, target - self.in_memory, away=False)

    def moved(self) -> dict[str, float]:
        """Return metrics of the number and bytes of parts moved since the last call. Empty without a schedule."""
        if self.offload_plan is None:
            return {}
        metrics = {"residency/moves": float(self._moves), "residency/bytes": float(self._bytes)}
        self._moves = self._bytes = 0
        return metrics

    def _passing(self, offload_plan: MemorySchedule) -> set[ModelPart]:
        return {part for moment in (*offload_plan.moments, *offload_plan.beside) for part in moment.passing}

    def _target(self, offload_plan: MemorySchedule, needs: Parts) -> set[ModelPart]:
        movable, passing = needs & offload_plan.sizes.keys(), needs & self._passing(offload_plan)
        count = len(offload_plan.moments)
        for step in range(count):
            at = (self._at + step) % count
            moment = offload_plan.moments[at]
            if moment.needs == movable and set(moment.passing) == passing:
                self._at = at
                return set(offload_plan.awake[at])
        return self._beside(
            offload_plan,
            next(
                (moment for moment in offload_plan.beside if moment.needs == movable), MemoryStep("", movable)
            ),
        )

    def _beside(self, offload_plan: MemorySchedule, moment: MemoryStep) -> set[ModelPart]:
        """Return the model parts that stay in memory during work outside the schedule.

        These are the parts that the work needs, plus any other loaded parts that still fit. Parts needed
        sooner come first.
        """
        target = set(moment.needs)
        for part in sorted(self.in_memory - target, key=lambda part: (self._next(offload_plan, part), part)):
            if offload_plan.held(moment, {*target, part}) <= offload_plan.limit:
                target.add(part)
        return target

    def _next(self, offload_plan: MemorySchedule, part: ModelPart) -> int:
        """Return how many steps it takes until a model part is next needed."""
        count = len(offload_plan.moments)
        return next(
            (step for step in range(count) if part in offload_plan.moments[(self._at + step) % count].needs),
            count,
        )

    def _move(self, offload_plan: MemorySchedule, parts: set[ModelPart], away: bool) -> None:
        for role, half in sorted({(part.role, part.half) for part in parts}):
            own = sorted(part for part in parts if (part.role, part.half) == (role, half))
            one = self._sides[role, half]
            (one.sleep if away else one.wake)(*(part.what for part in own))
            self.in_memory = self.in_memory.difference(own) if away else self.in_memory.union(own)
            self._moves += len(own)
            self._bytes += sum(offload_plan.sizes[part] for part in own)
