"""Faults in input from users and models: scripts, configurations, job values, code, random flows, bad
weights.

Each function yields the outcomes of a class of faults, for the table of ``chaos.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import run_faults as faults  # of tests/runs, as are the next two
import test_bad_days as bad_days
import test_check as checked  # of tests/cli
import test_code as code  # of tests/services/serving
import test_histories as histories
import test_importing as imported  # of tests/cli
import test_target as jobs  # of tests/cluster/submit
from chaos_folders import Outcome, Place
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from rlflow.author.load import load
from rlflow.cli.job import FORMS
from rlflow.config.flags import parse_flags
from rlflow.processes.sandbox import probe

HISTORIES = 12


def scripts(place: Place) -> Iterator[Outcome]:
    """Import scripts and settings of verl and OpenRLHF that are damaged, endless or incomplete.

    The import must refuse with the cause, and write nothing.
    """
    for number, (name, text, says) in enumerate(place.of(imported.DAMAGED, 12)):
        folder = place.folder / str(number)
        folder.mkdir()
        (folder / name).write_text(text)
        words = [
            "import",
            "openrlhf" if name == "open.sh" else "verl",
            folder / name,
            "-o",
            folder / "run.toml",
        ]
        output = faults.command(words, folder / "said")
        yield Outcome(True, says in output.err, output.code == 2, (folder / "run.toml").exists())


def configurations(place: Place) -> Iterator[Outcome]:
    """Use configurations that a run refuses. `rlflow check` must refuse them too."""
    for number, text in enumerate(place.of(checked.REFUSED, 6)):
        folder = place.folder / str(number)
        folder.mkdir()
        (folder / "run.toml").write_text(text)
        flags = ["grpo", "--config", folder / "run.toml"]
        codes = [
            faults.command([*words, *flags], folder / "said").code
            for words in (["check"], ["run", "--backend", "null"])
        ]
        yield Outcome(True, codes[0] == 2, codes[1] == 2, codes[0] != codes[1])


def joined(place: Place) -> Iterator[Outcome]:
    """Run random flows with follow-up prompts, and with selected and joined rows.

    The flows run on two ranks. Nodes start with random delays, and the run is killed at a random node.
    """
    for number, (shape, timing) in enumerate(place.of(shapes(HISTORIES), 2)):
        folder = place.folder / str(number)
        folder.mkdir()
        right = faults.in_child(partial(histories.checked, folder, shape, timing)) == 0
        yield Outcome(True, right, right, not right)


def shapes(count: int) -> list[tuple[dict[str, Any], int]]:
    """Return ``count`` random shapes of flows, with seeds. Each call returns the same ones.

    A shape's seed determines when nodes start and when the run is killed.
    """
    found = []

    @seed(0)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(shape=st.fixed_dictionaries(load(histories.DRAWN).SHAPES), timing=st.integers(0, 10_000))
    def collect(shape: dict[str, Any], timing: int) -> None:
        found.append((shape, timing))

    collect()
    return found


def job_texts(place: Place) -> Iterator[Outcome]:
    """Put values that a shell, Kubernetes or SkyPilot could execute into job texts.

    Each job text is executed with stand-ins for these programs.
    """
    for kind in FORMS:
        for number, value in enumerate(place.of(jobs.HOSTILE, 8)):
            folder = place.folder / f"{kind}-{number}"
            folder.mkdir()
            (folder / "run.toml").write_text(f'"hp.v" = {json.dumps(value)}\n')
            output = faults.command(
                ["job", "grpo", "--config", folder / "run.toml", "--for", kind, "--job.image", "i"],
                folder / "said",
            )
            right = (
                output.code == 0
                and faults.in_child(partial(handed_over, kind, output.out, value, folder)) == 0
            )
            yield Outcome(True, right, right, (folder / "work" / "made").exists())


def handed_over(kind: str, text: str, value: str, folder: Path) -> None:
    """Execute a job text. Raises AssertionError unless ``value`` reaches the run unchanged."""
    assert parse_flags(jobs.carried_out(kind, text, folder)[0][1:])["hp.v"] == value


def escaping_code(place: Place) -> Iterator[Outcome]:
    """Run code that tries to leave its sandbox, or to outlive its server."""
    if probe.missing("code"):
        return  # this machine does not support the complete sandbox, as the service reports
    found = code.attempted(place.folder)
    for name in sorted(set(found) - code.ALLOWED):
        yield Outcome(True, found[name], found[name], not found[name])
    right = faults.in_child(partial(code.test_code_ends_with_its_killed_server, place.folder)) == 0
    yield Outcome(True, right, right, not right)


def blown_up(place: Place) -> Iterator[Outcome]:
    """Let an optimizer step, or a stage with side effects, make weights non-finite.

    The run must name the cause and keep the checkpoint with finite weights.
    """
    spoiled = place.folder / "spoiled"
    spoiled.mkdir()
    claims: list[Callable[[], None]] = [
        partial(bad_days.test_exploding_weights_end_the_run_and_keep_the_finite_checkpoint, place.task),
        partial(
            bad_days.test_weights_broken_by_a_stage_are_not_saved,
            place.task,
            spoiled,
        ),
    ]
    for claim in claims:
        right = faults.in_child(claim) == 0
        yield Outcome(True, right, right, not right)


CLASSES: dict[str, Callable[[Place], Iterator[Outcome]]] = {
    "damaged scripts and settings of verl and OpenRLHF": scripts,
    "configurations that check and run must refuse": configurations,
    "hostile values in job texts": job_texts,
    "code that does more than compute": escaping_code,
    "follow-up prompts, joined rows, nodes late or killed": joined,
    "weights made non-finite by a step or a stage": blown_up,
}
