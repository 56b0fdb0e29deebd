"""Run trainings that learn little for a known reason, and check whether `rlflow explain` names the reason
first.

    python benchmarks/stalls.py run [--seeds 0 1] [--only too-easy …] [--budget 300]  # runs that are missing
    python benchmarks/stalls.py judge [--seeds 1 2 3]                    # the table
    python benchmarks/stalls.py healthy [--algorithms grpo ppo …]        # shipped runs, which need no finding
    python benchmarks/stalls.py fixtures FOLDER                          # recorded metrics for tests of the rules

Each reason (a stall) is planted into two algorithms with two strengths. A planted run has a healthy twin,
which is a run of the same algorithm and seed without the stall. A planted run counts if its twin gains at
least twice as much held-out accuracy. --out keeps the metrics and settings that `rlflow explain` reads. A
command that was killed therefore continues where it stopped, and changed rules can be checked without new
runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlflow.monitoring.explained import as_json, evidence_of
from rlflow.monitoring.recorded import recorded

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # so that stalls_plants.sampler can be imported
KEPT = ("metrics.jsonl", "figures.json", "settings.json", "bounds.json", "bounds.txt", "status.json")
SMALL = "--iterations 10 --held-out 256 --save-every 0 --quiet"
ROWS = {
    "grpo": "--prompts 32",
    "rloo": "--prompts 32",
    "ppo": "--prompts 128",
    "vapo": "--prompts 128 --hp.warmup 1",
}
POOLS = "--pools train=1,rollout=1"  # sampling ahead of training needs two pools
BROKEN = "--actor.generator stalls_plants.sampler"


@dataclass(frozen=True)
class Stall:
    """A reason why a run learns little, with the flags that cause it at each of two strengths."""

    name: str  # the rule that should report this reason
    algorithms: tuple[str, str]
    strengths: tuple[str, str]


def reward(function: str) -> str:
    """Return the flag that uses a reward function from `stalls_rewards.py`."""
    return f"--reward {HERE / 'stalls_rewards.py'}:{function}"


STALLS = (
    Stall("too-easy", ("grpo", "rloo"), (reward("close_200"), reward("close_60"))),
    Stall(
        "too-hard",
        ("grpo", "rloo"),
        ("--data.min_digits 4 --data.max_digits 4", "--data.min_digits 3 --data.max_digits 3"),
    ),
    Stall("rate-low", ("grpo", "ppo"), ("--actor.lr 1e-7", "--actor.lr 2e-6")),
    Stall("rate-high", ("grpo", "ppo"), ("--actor.lr 3e-2", "--actor.lr 5e-3")),
    Stall("clip-tight", ("grpo", "ppo"), ("--hp.clip 1e-5 --hp.epochs 4", "--hp.clip 1e-4 --hp.epochs 4")),
    Stall("length-cap", ("grpo", "ppo"), ("--hp.max_tokens 1", "--hp.max_tokens 2")),
    Stall("kl-strong", ("grpo", "ppo"), ("--hp.beta 20", "--hp.beta 5")),
    Stall("critic-cold", ("ppo", "vapo"), ("--critic.lr 1", "--critic.lr 1e-1")),
    Stall("stale", ("grpo", "rloo"), (f"{POOLS} --staleness 9", f"{POOLS} --staleness 6")),
    Stall("half-constant", ("grpo", "rloo"), (reward("nearly_all"), reward("most"))),
    Stall(
        "entropy-low",
        ("grpo", "rloo"),
        ("--actor.generate.temperature 0.05", "--actor.generate.temperature 0.15"),
    ),
    Stall(
        "missing",
        ("grpo", "ppo"),
        (f"{reward('missing_90')} --max-missing 0.99", f"{reward('missing_60')} --max-missing 0.99"),
    ),
    Stall("unsynchronised", ("grpo", "ppo"), (f"{BROKEN} --actor.every 0", f"{BROKEN} --actor.every 5")),
    Stall("mismatch", ("grpo", "ppo"), (f"{BROKEN} --actor.noise 1.0", f"{BROKEN} --actor.noise 0.6")),
)


@dataclass(frozen=True)
class Cell:
    """A run to measure: a planted run, a healthy twin, or a run of an unchanged algorithm."""

    stall: str
    algorithm: str
    strength: int
    seed: int
    flags: str = ""

    @property
    def name(self) -> str:
        return "-".join([self.stall, self.algorithm, str(self.strength), str(self.seed)])

    @property
    def twin(self) -> Cell:
        """The healthy run with the same algorithm and seed."""
        return Cell("healthy", self.algorithm, 0, self.seed)


def cells(seeds: list[int], only: list[str], strengths: list[int]) -> Iterator[Cell]:
    """Yield the planted runs: all stalls with the first seed and strength, then all stalls with the next."""
    for seed, strength in itertools.product(seeds, strengths):
        for stall in STALLS:
            for algorithm in stall.algorithms if not only or stall.name in only else ():
                yield Cell(stall.name, algorithm, strength, seed, stall.strengths[strength])


def with_twins(planted: Iterator[Cell]) -> Iterator[Cell]:
    """Yield each planted run, preceded by its healthy twin."""
    for cell in planted:
        yield from (cell.twin, cell)


def measure(cell: Cell, out: Path) -> None:
    """Run a cell and keep its records. If the run fails, its records are kept too."""
    from rlflow.cli.run import run_file

    os.environ["PYTHONPATH"] = str(HERE)
    with tempfile.TemporaryDirectory() as folder:
        small = "--quiet" if cell.stall == "shipped" else f"{SMALL} {ROWS[cell.algorithm]}"
        words = f"{small} {cell.flags} --seed {cell.seed} --out {folder} --name run".split()
        failed = ""
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                run_file(cell.algorithm, words, str)
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
        aside = out / f".{cell.name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for name in KEPT:
            if (Path(folder) / "run" / name).exists():
                shutil.copy(Path(folder) / "run" / name, aside / name)
        (aside / "cell.json").write_text(json.dumps({"flags": cell.flags, "failed": failed}))
        aside.rename(out / cell.name)


def run(planted: Iterator[Cell], out: Path, budget: float) -> None:
    """Run the missing cells.

    Each twin runs before its planted run. After ``budget`` seconds, no further cell starts.
    """
    end = time.monotonic() + budget
    for cell in with_twins(planted):
        if time.monotonic() > end:
            print("the budget is used up; the same command continues from here")
            return
        if not (out / cell.name).exists():
            start = time.monotonic()
            measure(cell, out)
            failed = json.loads((out / cell.name / "cell.json").read_text())["failed"].partition("\n")[0]
            print(
                f"{cell.name}: {time.monotonic() - start:.1f} s, gains {gain(out / cell.name):+.1%} {failed}",
                flush=True,
            )


def lines(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run, one dict per iteration."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def gain(folder: Path) -> float:
    """Return the gain in held-out accuracy from the first to the last evaluation; 0 with fewer than two
    evaluations.
    """
    accuracy = [line["evaluation/sampled"] for line in lines(folder) if "evaluation/sampled" in line]
    return accuracy[-1] - accuracy[0] if len(accuracy) > 1 else 0.0


def named(folder: Path) -> list[str]:
    """Return the findings of `rlflow explain` on a run, in order."""
    return [finding["name"] for finding in as_json(folder)["findings"]]


def stalls(cell: Cell, out: Path) -> bool:
    """Whether a planted run counts: its twin gains something, and at least twice as much as the run
    itself.
    """
    return gain(out / cell.twin.name) > 0 and gain(out / cell.twin.name) >= 2 * gain(out / cell.name)


def judge(planted: Iterator[Cell], out: Path) -> None:
    """Print a table of the runs in ``out``, and in how many counted runs the planted reason is
    named first.
    """
    print("| stall | algorithm | strength | seed | gain | gain of twin | counts | findings in order |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- | --- |")
    first = counted = 0
    for cell in planted:
        folder, twin = out / cell.name, out / cell.twin.name
        if not (folder.exists() and twin.exists()):
            continue
        own, others, names, counts = gain(folder), gain(twin), named(folder), stalls(cell, out)
        counted += counts
        first += counts and names[:1] == [cell.stall]
        print(
            f"| {cell.stall} | {cell.algorithm} | {cell.strength} | {cell.seed} | {own:+.1%} | "
            f"{others:+.1%} | {'yes' if counts else 'no'} | {', '.join(names) or 'nothing'} |"
        )
    twins = {path: named(path) for path in sorted(out.glob("healthy-*"))}
    print(
        f"\nnamed first: {first} of {counted} counted runs; healthy twins with findings, of {len(twins)}: "
        f"{sum(map(bool, twins.values()))}"
    )
    for path, names in twins.items():
        if names:
            print(f"{path.name}: {', '.join(names)}")


def healthy(algorithms: list[str], seeds: list[int], out: Path, budget: float) -> None:
    """Run rlflow's algorithms as `rlflow run NAME --seed SEED` does, and print the findings on each run."""
    end = time.monotonic() + budget
    for seed, algorithm in itertools.product(seeds, algorithms):
        cell = Cell("shipped", algorithm, 0, seed)
        if not (out / cell.name).exists():
            if time.monotonic() > end:
                print("the budget is used up; the same command continues from here")
                return
            measure(cell, out)
        print(
            f"{cell.name}: gains {gain(out / cell.name):+.1%}; {', '.join(named(out / cell.name)) or 'nothing'}",
            flush=True,
        )


def fixtures(planted: Iterator[Cell], out: Path, folder: Path) -> None:
    """Write the records of twins and of counted planted runs as small JSON files, for tests of the rules.

    A file contains the settings and metrics that the rules read, with four digits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for cell in (each for each in planted if (out / each.name).exists() and stalls(each, out)):
        for each in (cell.twin, cell):
            run = evidence_of(recorded(out / each.name))
            iterations = [
                [
                    number,
                    {
                        figure.key: float(f"{value:.4g}")
                        for figure, value in values.items()
                        if figure.key in NAMES
                    },
                ]
                for number, values in run.iterations
            ]
            kept = {
                "settings": {name: value for name, value in run.settings.items() if name in READ},
                "iterations": iterations,
            }
            (folder / f"{each.name}.json").write_text(json.dumps(kept) + "\n")


READ = ("staleness", "hp.beta")  # settings that rules read
NAMES = (
    "policy/entropy",
    "policy/kl_sampler",
    "policy/kl_reference",
    "policy/mismatch_mean",
    "policy/mismatch_factor",
    "reward/mean",
    "reward/lowest",
    "reward/highest",
    "reward/even_groups",
    "reward/even_lowest",
    "reward/even_highest",
    "reward/uneven_mean",
    "reward/missing_rate",
    "critic/explained_variance",
    "response/truncated",
    "funnel/rows_sampled",
    "funnel/rows_used",
    *(
        f"actor.update/{name}"
        for name in (
            "steps",
            "skipped_steps",
            "lr",
            "funnel/moved",
            "funnel/tokens",
            "funnel/tokens_with_gradient",
            "funnel/tokens_clipped_above",
            "funnel/tokens_clipped_below",
        )
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "judge", "healthy", "fixtures"))
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--only", nargs="+", default=[], choices=[stall.name for stall in STALLS])
    parser.add_argument("--strengths", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "ppo"])
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no new run starts")
    parser.add_argument("--out", default="runs/stalls")
    given = parser.parse_args()
    out = Path(given.out).absolute()
    planted = cells(
        given.seeds or ([1, 2, 3] if given.what == "judge" else [0, 1, 2, 3]), given.only, given.strengths
    )
    if given.what == "run":
        run(planted, out, given.budget)
    elif given.what == "judge":
        judge(planted, out)
    elif given.what == "healthy":
        healthy(given.algorithms, given.seeds or [0, 1, 2], out, given.budget)
    else:
        fixtures(planted, out, Path(given.folder or "fixtures"))


if __name__ == "__main__":
    main()
