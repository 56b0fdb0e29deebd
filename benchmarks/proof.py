"""Count how many faults `rlflow check` and the proof before iteration 1 find.

    python benchmarks/proof.py [--count N] [--algorithm NAME ...]

A fault is a small change to the source of an algorithm that comes with rlflow (`proof_faults.py`). It is
harmful if a gradient vanishes or changes its direction, or if the flow is refused. The gradient of each
update is taken with respect to the log-probs, for roles that learn from a reward. It is compared with the
gradient of the original file on the same rows and scores. A cosine below TURNED is harmful.

`--shipped` proves the unchanged algorithms by all claims of `rlflow prove` and prints a line for each. It
exits with 1 if a claim is falsified. With `--backend fsdp deepspeed vllm null` it proves four algorithms on
each backend. Trainers and null run on two Ray workers; the generator vllm runs in this process.

`--cost` prints the share of the quick proof in the packaged run, and the time of `rlflow prove`; by default
for ppo and grpo. It also alternates `--rounds N` short runs with and without the quick proof.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from proof_cost import cost_text
from proof_faults import Fault, faults

from rlflow.author.load import load_flow
from rlflow.cli.prove import whole
from rlflow.errors import FlowError, PlanError, StageError
from rlflow.runs.api import resolve_config
from rlflow.runs.context import RunContext
from rlflow.runs.prepare import prepare
from rlflow.runs.proof.claims import Claim, summary
from rlflow.runs.proof.directions import Direction, Row, keys
from rlflow.runs.proof.dry_run import uneven
from rlflow.runs.proof.flow_claims import FlowClaims
from rlflow.runs.proof.proving import dry_runs

ALGORITHMS = Path(__file__).parents[1] / "algorithms"
BACKENDS: dict[str, dict[str, Any]] = {  # settings of a run on a backend
    "local": {},
    "fsdp": {"trainer": "fsdp", "pools": "all=2"},
    "deepspeed": {"trainer": "deepspeed", "pools": "all=2"},
    "vllm": {"generator": "vllm"},
    "null": {"backend": "null", "data": "chain_sum", "pools": "all=2"},
}
# these algorithms have a critic, groups, resampled rows and pairs
FOUR = ("ppo", "grpo", "dapo", "online_dpo")
TURNED = 0.1  # a gradient is harmful if its cosine with the correct gradient is below this


def prepared(file: str, name: str, backend: str = "local") -> RunContext:
    """Prepare a run of an algorithm file on the packaged task, without held-out prompts."""
    flow = load_flow(file)
    values: dict[str, Any] = {"held_out": 0, "threads": 1, **BACKENDS[backend]} | (
        {"reward": ("task", "task")} if name == "gdpo" else {}
    )
    config, hp = resolve_config(flow, None, values)
    return prepare(flow, hp, config, judge=None)


def gradients(claims: FlowClaims) -> list[dict[str, Direction]]:
    """Do three dry runs, and return the gradient directions of each, by node."""
    return [claims.directions(claims.stage.dry_run_once(uneven(seed))) for seed in range(3)]


def by_row(direction: Direction) -> dict[Row, torch.Tensor]:
    """Return the gradient of each row, float64: [tokens], or [1] for the score of a row.

    The gradients of equal rows are summed.
    """
    sums: dict[Row, torch.Tensor] = {}
    for row, value in zip(keys(direction.rows), direction.main.double(), strict=True):
        own = value[: len(row[1])] if value.dim() else value[None]
        sums[row] = sums[row] + own if row in sums else own
    return sums


def cosine(one: Direction, other: Direction) -> float:
    """Return the cosine of two gradients. If a row is missing in one of them, its gradient there is 0."""
    left, right = by_row(one), by_row(other)
    dot = sum(float((value * right[row]).sum()) for row, value in left.items() if row in right)
    sizes = [sum(float(value.square().sum()) for value in values.values()) ** 0.5 for values in (left, right)]
    return dot / (sizes[0] * sizes[1]) if all(sizes) else 0.0


def harmful(sound: list[dict[str, Direction]], broken: list[dict[str, Direction]]) -> bool:
    """Whether a fault makes the gradient of any update vanish or change its direction, averaged over the dry
    runs.

    ``sound`` and ``broken``: gradient directions without and with the fault, by node, for each dry run.
    """
    for node in sound[0]:
        pairs = [
            (one[node], other.get(node)) for one, other in zip(sound, broken, strict=True) if node in one
        ]
        if (
            sum(cosine(one, other) if other is not None else 0.0 for one, other in pairs) / len(pairs)
            < TURNED
        ):
            return True
    return False


def tried(fault: Fault, name: str, sound: list[dict[str, Direction]]) -> tuple[bool, list[Claim] | str]:
    """Test a fault. Returns (whether it is harmful, findings).

    The findings are the falsified claims, or the code of the error that refuses the file. ``sound``: gradient
    directions without the fault.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(fault.text)
        try:
            context = prepared(str(path), name)
        except (FlowError, PlanError) as error:
            return True, error.problems[0].code
        try:
            claims = FlowClaims(dry_runs(context, 8))
            return harmful(sound, gradients(claims)), [
                claim for claim in claims.claims() if claim.verdict == "falsified"
            ]
        except StageError as error:
            return True, f"stage {error.stage}"
        finally:
            context.close()


def proved(name: str, backend: str) -> list[Claim]:
    """Prove all claims about one of rlflow's algorithms on the packaged task."""
    context = prepared(str(ALGORITHMS / f"{name}.py"), name, backend)
    try:
        return list(whole(context))
    finally:
        context.close()


def shipped(names: list[str], backends: list[str]) -> int:
    """Prove rlflow's algorithms. Prints a line for each, followed by the claims that are not proved.

    Returns 1 if a claim is falsified, otherwise 0.
    """
    wrong, runs = 0, [(name, backend) for backend in backends for name in names]
    for name, backend in runs:
        began = time.monotonic()
        claims = proved(name, backend)
        print(f"{name:<14} {backend:<9} {summary(claims)}, {time.monotonic() - began:.1f} s", flush=True)
        for claim in claims:
            if claim.verdict != "proved":
                print(f"    {claim}", flush=True)
        wrong += any(claim.verdict == "falsified" for claim in claims)
    print(f"{len(names)} algorithms on {', '.join(backends)}: {wrong} of {len(runs)} with a falsified claim")
    return int(wrong > 0)


def chosen_faults(names: list[str], count: int) -> list[tuple[str, Fault]]:
    """Return all faults of these algorithms, or a random sample of ``count`` faults, the same in
    each call.
    """
    every = [(name, fault) for name in names for fault in faults((ALGORITHMS / f"{name}.py").read_text())]
    return random.Random(0).sample(every, count) if 0 < count < len(every) else every


def sound_gradients(name: str) -> list[dict[str, Direction]]:
    """Return the gradient directions of the unchanged algorithm file."""
    context = prepared(str(ALGORITHMS / f"{name}.py"), name)
    try:
        return gradients(FlowClaims(dry_runs(context, 8)))
    finally:
        context.close()


@dataclass(frozen=True)
class Verdict:
    """The result of testing a fault.

    ``should``: whether the fault is harmful and should be found. ``found``: names of falsified claims, or the
    code of the error that refuses the file.
    """

    algorithm: str
    where: str
    kind: str
    should: bool
    found: list[str]
    seconds: float

    def __str__(self) -> str:
        findings = ", ".join(self.found) or "nothing found"
        return f"{self.algorithm} {self.where} {self.kind}: {'harmful' if self.should else 'harmless'}; {findings}"


def kept(journal: Path | None) -> list[Verdict]:
    """Return the verdicts recorded in a journal; empty without a journal."""
    return (
        [Verdict(**json.loads(line)) for line in journal.read_text().splitlines()]
        if journal and journal.exists()
        else []
    )


def verdicts(chosen: list[tuple[str, Fault]], journal: Path | None, budget: float) -> Iterator[Verdict]:
    """Yield the verdict on each fault. Recorded verdicts come first; new verdicts are added to the journal.

    After ``budget`` seconds, no further fault is tested.
    """
    end, sound = time.monotonic() + budget, dict[str, list[dict[str, Direction]]]()
    known = {(verdict.algorithm, verdict.where, verdict.kind): verdict for verdict in kept(journal)}
    yield from (known[key] for name, fault in chosen if (key := (name, fault.where, fault.kind)) in known)
    for name, fault in chosen:
        if (name, fault.where, fault.kind) in known or time.monotonic() > end:
            continue
        began = time.monotonic()
        if name not in sound:
            sound[name] = sound_gradients(name)
        should, result = tried(fault, name, sound[name])
        found = [result] if isinstance(result, str) else list(dict.fromkeys(claim.name for claim in result))
        verdict = Verdict(name, fault.where, fault.kind, should, found, round(time.monotonic() - began, 2))
        if journal:
            with journal.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
        yield verdict


def judge(chosen: list[tuple[str, Fault]], journal: Path | None, budget: float) -> None:
    """Test the faults and print the findings on each, and at the end the share of harmful faults that were
    found.
    """
    every = []
    for verdict in verdicts(chosen, journal, budget):
        every.append(verdict)
        print(verdict, flush=True)
    should_be_found = [verdict for verdict in every if verdict.should]
    missed = [verdict for verdict in should_be_found if not verdict.found]
    share = 1 - len(missed) / max(len(should_be_found), 1)
    print(
        f"{len(every)} of {len(chosen)} faults tested, {len(should_be_found)} harmful: "
        f"{len(should_be_found) - len(missed)} found "
        f"({share:.1%}); {sum(bool(verdict.found) for verdict in every if not verdict.should)} harmless "
        "ones also found; "
        f"{sum(verdict.seconds for verdict in every):.0f} s"
    )
    for verdict in missed:
        print(f"  missed: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=0, help="test a random sample of this size; 0: all faults"
    )
    parser.add_argument("--algorithm", nargs="+", help="use only these algorithms")
    parser.add_argument(
        "--journal",
        type=Path,
        help="file that stores each verdict; a killed command continues from it",
    )
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds after which no new fault is tested"
    )
    parser.add_argument("--shipped", action="store_true", help="prove the unchanged algorithms")
    parser.add_argument("--cost", action="store_true", help="measure the cost of proofs")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of --cost")
    parser.add_argument(
        "--backend",
        nargs="+",
        choices=tuple(BACKENDS),
        help="with --shipped: backends to prove on; by default four algorithms",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = sorted(path.stem for path in ALGORITHMS.glob("[!_]*.py"))
    if options.shipped:
        sys.exit(
            shipped(
                options.algorithm or (list(FOUR) if options.backend else every), options.backend or ["local"]
            )
        )
    if options.cost:
        for name in options.algorithm or ["ppo", "grpo"]:
            print(cost_text(name, options.rounds), flush=True)
        return
    names = options.algorithm or every
    judge(chosen_faults(names, options.count), options.journal, options.budget)


if __name__ == "__main__":
    main()
