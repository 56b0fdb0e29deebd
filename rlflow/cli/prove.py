"""`rlflow prove`: test on a few rows, before a run, whether it would learn from its rewards."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.author.load import load_flow
from rlflow.config.flags import parse_flags, read_flags
from rlflow.errors import PlanError, StageError
from rlflow.monitoring.terminal import fitted

if TYPE_CHECKING:
    from rlflow.runs.context import RunContext
    from rlflow.runs.proof.claims import Claim
    from rlflow.runs.proof.dry_run import DryRuns


def prove_file(file: str, arguments: Sequence[str]) -> int:
    """Print each claim about a run with its verdict. Returns 2 if any is falsified, else 0.

    ``arguments``: the flags of `run`. Raises FlowError, PlanError and StageError.
    """
    plans, arguments = split_plans(arguments)
    flow, values = load_flow(file), read_flags(arguments)
    if plans:
        return compare_plans(file, plans, values)
    from rlflow.runs.api import resolve_config
    from rlflow.runs.prepare import prepare  # loads backends, which takes seconds
    from rlflow.runs.proof.claims import summary

    config, hp = resolve_config(flow, None, values)
    context = prepare(flow, hp, config, judge=None)
    claims = []
    try:
        with context.computing():
            for claim in whole(context):
                print(fitted(str(claim), sys.stdout), flush=True)
                claims.append(claim)
    finally:
        context.close()
    wrong = any(claim.verdict == "falsified" for claim in claims)
    print(f"{file}: {'falsified' if wrong else 'nothing falsified'} ({summary(claims)})")
    return 2 if wrong else 0


def split_plans(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (the flags of each ``--as``, all other arguments).

    Raises PlanError unless ``--as`` is given exactly twice or not at all.
    """
    plans, rest, words = [], [], list(arguments)
    while words:
        word = words.pop(0)
        if word == "--as" and words:
            plans.append(words.pop(0))
        elif word.startswith("--as="):
            plans.append(word.removeprefix("--as="))
        else:
            rest.append(word)
    if len(plans) not in (0, 2):
        raise PlanError.of(
            "prove-plans",
            "rlflow prove compares exactly two plans",
            found=f"number of --as flags: {len(plans)}",
            expected="--as twice, or not at all",
            remedy='--as "--stream 1" --as "--stream 4"',
        )
    return plans, rest


def compare_plans(file: str, plans: Sequence[str], values: Mapping[str, Any]) -> int:
    """Run a file under two plans, and print where the results first differ.

    Returns 2 if they differ by more than rounding, else 0. ``plans``: the flags of each plan. ``values``: the
    flags that both share.
    """
    from rlflow.runs.preview import compared

    flow = load_flow(file)
    one, other = ({**values, **parse_flags(shlex.split(plan))} for plan in plans)
    with tempfile.TemporaryDirectory() as folder:
        claim = compared(flow, one, other, Path(folder))
    print(fitted(str(claim), sys.stdout))
    return 2 if claim.verdict == "falsified" else 0


def whole(context: RunContext) -> Iterator[Claim]:
    """Yield all claims about a prepared run.

    If a stage doesn't accept made-up scores, only claims that use the run's own scores are yielded. Raises
    StageError if the stage fails on those, too.
    """
    from rlflow.runs.proof.proving import dry_runs, unfinished
    from rlflow.runs.proof.reward_claims import reward_claims

    stage = dry_runs(context)
    try:
        yield from _with_synthetic_scores(context, stage)
    except StageError as error:
        yield from reward_claims(stage, context.reasons, scoring=None)
        yield unfinished(
            context,
            "a stage does not accept the synthetic scores of a dry run, from 0 to 1: "
            f"{str(error).splitlines()[0]}",
        )


def _with_synthetic_scores(context: RunContext, stage: DryRuns) -> Iterator[Claim]:
    from rlflow.runs.proof.dry_run import uneven
    from rlflow.runs.proof.flow_claims import FlowClaims
    from rlflow.runs.proof.reward_claims import reward_claims
    from rlflow.runs.proof.weights_claims import WeightsClaims

    flow = FlowClaims(stage)
    yield from flow.claims()
    yield from reward_claims(stage, context.reasons, uneven(0))
    yield from WeightsClaims(
        flow, short=context.options.dtype == "bfloat16", alone=context.alone, resizing=context.resizing
    ).claims()
