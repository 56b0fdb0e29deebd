"""The proof that a run makes of itself before its first iteration: the quick part of `rlflow prove`, which changes no weights."""

from __future__ import annotations

import time

from rlflow.data.prompts import Prompts
from rlflow.errors import PlanError, Problem, Stopped
from rlflow.graph.lineage import expected_rows
from rlflow.proof.claims import Claim
from rlflow.proof.flow_claims import FlowClaims
from rlflow.proof.rehearsal import Rehearsals
from rlflow.runs.context import RunContext

ROWS = 16  # at least, of a rehearsal
LONGEST = 16  # tokens of a row
QUICK_SETS, QUICK_LONGEST = 3, 8
QUICK_SECONDS = 0.8  # after which no further claim is begun: 2 % of a packaged run
SHORT = 10  # iterations of a run that is over before a proof is worth its time


def rehearsals(context: RunContext, longest: int = LONGEST) -> Rehearsals:
    """Where a run is rehearsed: its own engine and plan, and prompts from the beginning of its data by a cursor of their own."""
    prompts = Prompts(context.prompts.data, context.options.seed)
    rows = max(expected_rows(context.plan.graph, 1, "prompts").values())
    count = min(max(-(-ROWS // rows), 4), context.options.prompts, len(context.prompts.data))
    return Rehearsals(context.engine, context.executor.lanes, context.plan, prompts.take(count), prompts.take, longest,
                      context.executor.board)


def wanted(context: RunContext) -> bool:
    """Whether a run proves itself before it begins: not where it is over too soon, has no models, or acts in an environment, which others
    may see."""
    options, engine = context.options, context.engine
    modelled = all(hasattr(model.trainer or model.generator, "settings") for model in engine.models.values())
    here = context.workers is None and not engine.environments
    return options.prove in ("quick", "strict") or options.prove == "auto" and options.iterations >= SHORT and modelled and here


def quick(context: RunContext) -> list[Claim]:
    """The claims about the run's flow that need no update: those for which there is time, or all of them where a run depends on them."""
    began, claims, hurried = time.monotonic(), list[Claim](), context.options.prove != "strict"
    try:
        for claim in FlowClaims(rehearsals(context, QUICK_LONGEST), QUICK_SETS).claims():
            claims.append(claim)
            if hurried and time.monotonic() - began > QUICK_SECONDS:
                claims.append(unfinished(context, "what is left takes too long at the start of a run; rlflow prove tries it"))
                break
    except Exception as error:  # of made scores or short rows, which the run may never have
        if isinstance(error, Stopped) or not hurried:
            raise
        claims.append(unfinished(context, f"the rehearsal ended: {str(error).splitlines()[0] if str(error) else type(error).__name__}"))
    context.engine.moved()  # of what was moved for it nothing is told
    context.engine.ran()
    context.engine.traffic()
    return claims


def unfinished(context: RunContext, why: str) -> Claim:
    """The claim in the place of those that were not tried."""
    return Claim("rehearsed", context.plan.graph.name, "unproved", why)


def refusal(claims: list[Claim]) -> PlanError | None:
    """The error that ends a run of which a claim is falsified; None where none is."""
    remedy = "mend the flow, or run with --prove auto, which warns and goes on, or --prove off"
    wrong = [claim for claim in claims if claim.verdict == "falsified"]
    return PlanError(*(Problem(claim.name, f"{claim.subject}: {claim.sentence}", claim.place, found=claim.number,
                               expected="no falsified claim, as --prove strict asks", remedy=remedy) for claim in wrong)) if wrong else None
