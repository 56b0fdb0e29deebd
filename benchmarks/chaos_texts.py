"""Files and flows of others: scripts to import, configurations, rows that are asked, chosen and joined, weights that blow up.

Each function yields outcomes of faults of one class, for the table of ``chaos.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import run_faults as faults  # of tests/runs, as are the next two
import test_bad_days as bad_days
import test_check as checked  # of tests/cli
import test_histories as histories
import test_importing as imported  # of tests/cli
from chaos_folders import Outcome, Place
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from rlflow.author.load import load

HISTORIES = 12


def scripts(place: Place) -> Iterator[Outcome]:
    """Scripts and settings of verl and OpenRLHF that are damaged, grow without end or do not say all: refused by name, nothing written."""
    for number, (name, text, says) in enumerate(place.of(imported.DAMAGED, 12)):
        folder = place.folder / str(number)
        folder.mkdir()
        (folder / name).write_text(text)
        words = ["import", "openrlhf" if name == "open.sh" else "verl", folder / name, "-o", folder / "run.toml"]
        said = faults.command(words, folder / "said")
        yield Outcome(True, says in said.err, said.code == 2, (folder / "run.toml").exists())


def configurations(place: Place) -> Iterator[Outcome]:
    """Configurations that a run refuses: `check` refuses them too, and no folder of a run is made."""
    for number, text in enumerate(place.of(checked.REFUSED, 6)):
        folder = place.folder / str(number)
        folder.mkdir()
        (folder / "run.toml").write_text(text)
        flags = ["grpo", "--config", folder / "run.toml"]
        codes = [faults.command([*words, *flags], folder / "said").code for words in (["check"], ["run", "--backend", "null"])]
        yield Outcome(True, codes[0] == 2, codes[1] == 2, codes[0] != codes[1])


def joined(place: Place) -> Iterator[Outcome]:
    """Flows of drawn shapes whose rows are asked, chosen and joined: nodes begin late, on two ranks, and the run is killed at a node."""
    for number, (shape, chance) in enumerate(place.of(shapes(HISTORIES), 2)):
        folder = place.folder / str(number)
        folder.mkdir()
        right = faults.in_child(partial(histories.checked, folder, shape, chance)) == 0
        yield Outcome(True, right, right, not right)


def shapes(count: int) -> list[tuple[dict[str, Any], int]]:
    """(shape of a flow, a number that decides when nodes begin and the run is killed), the same ones each time."""
    found = []

    @seed(0)
    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(shape=st.fixed_dictionaries(load(histories.DRAWN).SHAPES), chance=st.integers(0, 10_000))
    def collect(shape: dict[str, Any], chance: int) -> None:
        found.append((shape, chance))

    collect()
    return found


def blown_up(place: Place) -> Iterator[Outcome]:
    """A step, or a stage with side effects, that leaves weights that are not finite: named, and the finite checkpoint stays."""
    spoiled = place.folder / "spoiled"
    spoiled.mkdir()
    claims: list[Callable[[], None]] = [
        partial(bad_days.test_weights_that_blow_up_end_the_run_and_the_finite_checkpoint_stays, place.task),
        partial(bad_days.test_weights_that_a_stage_with_side_effects_breaks_are_not_saved_and_the_stage_is_named, place.task, spoiled),
    ]
    for claim in claims:
        right = faults.in_child(claim) == 0
        yield Outcome(True, right, right, not right)


CLASSES: dict[str, Callable[[Place], Iterator[Outcome]]] = {
    "scripts and settings of others": scripts,
    "configurations that check and run must refuse": configurations,
    "rows asked, chosen and joined, nodes late or killed": joined,
    "weights blown up by a step or a stage": blown_up,
}
