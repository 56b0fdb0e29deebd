"""The proof that a run makes of itself before its first iteration: the quick part of `rlflow prove`, which
changes no weights."""

from __future__ import annotations

import time

from rlflow.compiler.graph.ancestry import expected_rows
from rlflow.data.prompts import Prompts
from rlflow.errors import PlanError, Problem, StageError, Stopped
from rlflow.runs.context import RunContext
from rlflow.runs.proof.claims import Claim
from rlflow.runs.proof.flow_claims import FlowClaims
from rlflow.runs.proof.rehearsal import Rehearsals, zero_or_one

ROWS = 16  # at least, of a rehearsal
LONGEST = 16  # tokens of a row
QUICK_SETS, QUICK_LONGEST = 3, 8
# after which no further claims are tried than those that may end a run: 2 % of a packaged run
QUICK_SECONDS = 0.8
IN_REHEARSAL = (
    "in the rehearsal before iteration 1, with a few short rows and synthetic scores; --prove off leaves it "
    "out, where the rows of the run itself are others"
)
REMEDY = (
    "correct the flow; or go on all the same with --prove warn, where what a reward gives is a cost that "
    "the flow subtracts, or with --prove off"
)
SHORT = 10  # iterations of a run that is over before a proof is worth its time


def rehearsals(context: RunContext, longest: int = LONGEST) -> Rehearsals:
    """Where a run is rehearsed: its own engine and plan, and prompts from the beginning of its data by a
    cursor of their own."""
    prompts = Prompts(context.prompts.data, context.options.seed)
    rows = max(expected_rows(context.plan.graph, 1, "prompts").values())
    count = min(max(-(-ROWS // rows), 4), context.options.prompts, len(context.prompts.data))
    return Rehearsals(
        context.engine,
        context.executor.lanes,
        context.plan,
        prompts.take(count),
        prompts.take,
        longest,
        context.executor.board,
    )


def wanted(context: RunContext) -> bool:
    """Whether a run proves itself before it begins: not where it is over too soon, has no models, or acts in
    an environment, which others may see."""
    options, engine = context.options, context.engine
    asked = options.prove in ("quick", "strict", "warn")
    modelled = all(hasattr(model.trainer or model.generator, "settings") for model in engine.models.values())
    here = context.workers is None and not engine.environments
    return asked or options.prove == "auto" and options.iterations >= SHORT and modelled and here


def quick(context: RunContext) -> list[Claim]:
    """The claims about the run's flow that need no update: those for which there is time, or all of them
    where a run depends on them. Raises what a rehearsal raises, unless it is the synthetic scores that a
    stage does not take."""
    began, stage = time.monotonic(), rehearsals(context, QUICK_LONGEST)
    try:
        return _claims(context, stage, began)
    except StageError as error:
        error.message += f"\n  {IN_REHEARSAL}"
        raise
    finally:
        context.engine.moved()  # the run's records leave out what the rehearsal moved and ran
        context.engine.ran()
        context.engine.traffic()


def _claims(context: RunContext, stage: Rehearsals, began: float) -> list[Claim]:
    claims, hurried = list[Claim](), context.options.prove != "strict"
    try:
        flow = FlowClaims(stage, QUICK_SETS)
    except StageError as error:
        if not hurried:
            raise
        stage.rehearse(zero_or_one)  # raises again, unless it was about scores between 0 and 1
        return [unfinished(context, f"a stage takes no scores between 0 and 1: {_first_line(error)}")]
    try:
        for group in flow.groups():
            claims += group
            if hurried and time.monotonic() - began > QUICK_SECONDS:
                claims.append(
                    unfinished(
                        context, "what is left takes too long at the start of a run; rlflow prove tries it"
                    )
                )
                break
    # of a loss, or of a stage with scores that are far from 0 and 1, which the run may never have
    except Exception as error:
        if isinstance(error, Stopped) or not hurried:
            raise
        claims.append(unfinished(context, f"the claims ended: {_first_line(error)}"))
    return claims


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def unfinished(context: RunContext, why: str) -> Claim:
    """The claim in the place of those that were not tried."""
    return Claim("rehearsed", context.plan.graph.name, "unproved", why)


def refusal(claims: list[Claim], prove: str) -> PlanError | None:
    """The error that ends a run before its first iteration: with --prove strict where a claim is falsified,
    else where good rows are made less likely; None where the run may begin."""
    wrong = [
        claim
        for claim in claims
        if claim.verdict == "falsified" and prove != "warn" and (claim.ends_run or prove == "strict")
    ]
    expected = (
        "no falsified claim, as --prove strict asks"
        if prove == "strict"
        else "what is paid more is made more likely"
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
