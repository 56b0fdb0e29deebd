"""The records of a run, looked at before any model is loaded: what no model can be given is told with its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlflow.compiler.graph.model import Graph
from rlflow.config.options import Options
from rlflow.config.roles.dataset import split_records
from rlflow.config.roles.positions import room
from rlflow.config.roles.roles import Roles
from rlflow.data.dataset import Dataset
from rlflow.data.faults import Fault, refused, spoken
from rlflow.data.mixed import prompts_of
from rlflow.data.pairs import check_pairs, equal_pairs, told
from rlflow.data.prompts import Prompts

SECONDS = 10.0  # for records to train on; what is left is judged when it is drawn


def screen_records(
    data: Dataset, graph: Graph, roles: Roles, options: Options, note: Callable[[str], None], begun: bool = False
) -> tuple[Prompts, Dataset]:
    """The cursor over the records to train on, and those held out, all of which can be used. Raises PlanError for records that cannot
    be, unless they are to be left out (--bad-records skip) or the run has ``begun``; then they are told to ``note``. Pairs whose responses
    are the same are told, and refused where all are."""
    limited = replace(data, room=room(graph, roles, options.reward, data.shape != "prompts"))
    training, held_out = split_records(limited, options.held_out)
    prompts, began = prompts_of(training, options.seed), time.monotonic()
    asides = held_out.faulty(range(len(held_out)))
    judged = prompts.check(SECONDS)
    faults = [*data.faults, *asides.values(), *prompts.faults.values()]
    total = judged + len(held_out) + len(data.faults)
    if faults and (len(faults) == total or not begun and options.bad_records == "stop"):
        raise refused(data.name, in_order(faults), total, limited.room)
    if faults:
        note(f"{len(faults)} of {total} records of {data.name} are left out: {spoken(in_order(faults))}")
    if judged < len(training):
        note(f"{judged} of {len(training)} records to train on were checked in {time.monotonic() - began:.0f} s; the others are checked "
             "when they are drawn, and left out where they cannot be used")
    equal = equal_pairs(data, SECONDS)
    if not begun:
        check_pairs(data, equal)
    if equal:
        note(told(data, equal))
    usable = [record for i, record in enumerate(held_out.records) if i not in asides]
    return prompts, replace(held_out, records=usable)


def in_order(faults: Sequence[Fault]) -> list[Fault]:
    """Faults as their records stand in the data."""
    return sorted(faults, key=lambda fault: (fault.place.path, fault.place.line) if fault.place else ("", 0))
