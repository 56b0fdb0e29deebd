"""The proof before a run's first iteration: the quick part of `rlflow prove`, which doesn't change weights."""

from __future__ import annotations

import time

from rlflow.compiler.graph.ancestry import expected_rows
from rlflow.data.prompts import Prompts
from rlflow.errors import PlanError, Problem, StageError, Stopped
from rlflow.runs.context import RunContext
from rlflow.runs.proof.claims import Claim
from rlflow.runs.proof.dry_run import DryRuns, zero_or_one
from rlflow.runs.proof.flow_claims import FlowClaims

ROWS = 16  # minimum number of rows in a dry run
LONGEST = 16  # maximum sampled tokens of a row
QUICK_SETS, QUICK_LONGEST = 3, 8
# time limit, 2 % of a packaged run. The first group of claims is always checked, because it may stop the run
QUICK_SECONDS = 0.8
IN_DRY_RUN = (
    "this happened in the dry run before iteration 1, with a few short rows and synthetic scores; if the "
    "rows of the run itself are different, turn the dry run off: --prove off"
)
REMEDY = (
    "correct the flow; if the reward is a cost that the flow subtracts, continue with --prove warn or "
    "--prove off"
)
SHORT = 10  # iterations; in a shorter run a proof is not worth its time


def dry_runs(context: RunContext, longest: int = LONGEST) -> DryRuns:
    """Return a run's dry runs, which use its own engine and plan on the first prompts in its data.

    The run's own position in the data doesn't change. ``longest``: how many tokens to sample per row at most.
    """
    prompts = Prompts(context.prompts.data, context.options.seed)
    rows = max(expected_rows(context.plan.graph, 1, "prompts").values())
    count = min(max(-(-ROWS // rows), 4), context.options.prompts, len(context.prompts.data))
    return DryRuns(
        context.engine,
        context.executor.queues,
        context.plan,
        prompts.take(count),
        prompts.take,
        longest,
        context.executor.heartbeat_page,
    )


def wanted(context: RunContext) -> bool:
    """Return whether a run should prove itself before it starts.

    With ``--prove auto``, it should unless it is short, uses pools, has a backend without models, or uses an
    environment, where a dry run could have side effects.
    """
    options, engine = context.options, context.engine
    asked = options.prove in ("quick", "strict", "warn")
    modelled = all(hasattr(model.trainer or model.generator, "settings") for model in engine.models.values())
    here = context.workers is None and not engine.environments
    return asked or (options.prove == "auto" and options.iterations >= SHORT and modelled and here)


def quick(context: RunContext) -> list[Claim]:
    """Check the claims about the run's flow that don't require updating weights, and return them.

    With ``--prove strict``, all of them are checked, otherwise as many as the time limit allows. Errors in a
    dry run are raised, unless a stage only rejects the synthetic scores.
    """
    began, stage = time.monotonic(), dry_runs(context, QUICK_LONGEST)
    try:
        return _claims(context, stage, began)
    except StageError as error:
        error.message += f"\n  {IN_DRY_RUN}"
        raise
    finally:
        context.engine.moved()  # reset counters, so that the run's records do not include the dry run
        context.engine.ran()
        context.engine.traffic()


def _claims(context: RunContext, stage: DryRuns, began: float) -> list[Claim]:
    claims, hurried = list[Claim](), context.options.prove != "strict"
    try:
        flow = FlowClaims(stage, QUICK_SETS)
    except StageError as error:
        if not hurried:
            raise
        stage.dry_run_once(zero_or_one)  # raises again, unless the stage only rejects scores between 0 and 1
        return [unfinished(context, f"a stage rejects scores between 0 and 1: {_first_line(error)}")]
    try:
        for group in flow.groups():
            claims += group
            if hurried and time.monotonic() - began > QUICK_SECONDS:
                claims.append(
                    unfinished(
                        context, "the time limit at the start of a run was reached; rlflow prove checks all"
                    )
                )
                break
    # a loss or a stage may raise for scores far from 0 and 1, which the run itself may never have
    except Exception as error:
        if isinstance(error, Stopped) or not hurried:
            raise
        claims.append(unfinished(context, f"the checks stopped with an error: {_first_line(error)}"))
    return claims


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def unfinished(context: RunContext, why: str) -> Claim:
    """Return a single claim that stands for all claims that weren't checked. ``why``: the reason."""
    return Claim("rehearsed", context.plan.graph.name, "unproved", why)


def refusal(claims: list[Claim], prove: str) -> PlanError | None:
    """Return the error that keeps a run from starting, or None if it may start.

    With ``--prove strict``, any falsified claim stops the run, and with ``--prove warn``, none does.
    Otherwise, only a falsified claim with ``ends_run`` stops it, which means that the update makes rows with
    higher scores less likely.
    """
    wrong = [
        claim
        for claim in claims
        if claim.verdict == "falsified" and prove != "warn" and (claim.ends_run or prove == "strict")
    ]
    expected = (
        "no falsified claim (--prove strict)"
        if prove == "strict"
        else "the update makes rows with higher scores more likely"
    )
    return (
        PlanError(
            *(
                Problem(
                    claim.name,
                    f"{claim.subject}: {claim.sentence}",
                    claim.place,
                    found=claim.number,
                    expected=expected,
                    remedy=REMEDY,
                )
                for claim in wrong
            )
        )
        if wrong
        else None
    )
