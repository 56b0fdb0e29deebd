"""`rlflow prove`: whether a run would learn from what it is paid for, tried on a few rows before its first iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.author.load import load_flow
from rlflow.config.flags import parse_flags, read_toml

if TYPE_CHECKING:
    from rlflow.proof.claims import Claim
    from rlflow.runs.context import RunContext


def prove_file(file: str, arguments: Sequence[str]) -> int:
    """Print each claim with its verdict; 2 where one is falsified. Takes the flags of `run`. Raises FlowError, PlanError, StageError."""
    flow, values = load_flow(file), parse_flags(arguments)
    config_file = values.pop("config", None)
    values = (read_toml(Path(config_file)) if config_file else {}) | values
    from rlflow.proof.claims import summary
    from rlflow.runs.api import resolve_config
    from rlflow.runs.prepare import prepare  # loads backends, which takes seconds

    config, hp = resolve_config(flow, None, values)
    context = prepare(flow, hp, config, judge=None)
    claims = []
    try:
        for claim in whole(context):
            print(claim, flush=True)
            claims.append(claim)
    finally:
        context.close()
    wrong = any(claim.verdict == "falsified" for claim in claims)
    print(f"{file}: {'falsified' if wrong else 'nothing falsified'} ({summary(claims)})")
    return 2 if wrong else 0


def whole(context: RunContext) -> Iterator[Claim]:
    """All claims about a run that is prepared."""
    from rlflow.proof.flow_claims import FlowClaims
    from rlflow.proof.weights_claims import WeightsClaims
    from rlflow.runs.proving import rehearsals

    flow = FlowClaims(rehearsals(context))
    yield from flow.claims()
    yield from WeightsClaims(flow, short=context.options.dtype == "bfloat16").claims()
