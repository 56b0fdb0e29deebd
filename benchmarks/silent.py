"""A reward fault that TRL's logs do not show, and that rlflow reports before iteration 1.

    python benchmarks/silent.py [--iterations 20] [--only trl|rlflow]

The reward function (`silent_rewards.py`) scores responses sorted by length, as is usual for a reward model,
and forgets to restore the order of the scores. TRL's GRPOTrainer trains the packaged model on the packaged
task with the correct and with the faulty function, and its logs are printed side by side. Then `rlflow prove
grpo` checks both functions. TRL runs in the virtual environment of `rlflow bench peers`, which is created if
it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlflow.benchmarks import peers
from rlflow.benchmarks.measured_process import environment
from rlflow.benchmarks.peer import interpreter
from rlflow.config.packaged import packaged
from rlflow.data.source import open_data

HERE = Path(__file__).resolve().parent
PEERS = Path(next(iter(peers.__path__)))
REWARDS = HERE / "silent_rewards.py"
LOGGED = ("loss", "grad_norm", "reward", "reward_std", "entropy")  # TRL's metrics that are printed
RIGHT = 256  # number of held-out questions that are scored
PROMPTS = 16  # prompts in an iteration; the samples and lengths are those of the packaged task
RATE = 1e-4


def settings(folder: Path, iterations: int) -> dict[str, Any]:
    """Write the questions of the packaged task to a folder, and return the settings of the TRL run."""
    values = packaged("grpo")[1]
    task = {name.removeprefix("data."): value for name, value in values.items() if name.startswith("data.")}
    for name, data in zip(
        ("data", "held_out"), open_data(values["data"][0], task=task).split(RIGHT), strict=True
    ):
        lines = [
            json.dumps({"prompt": str(record.prompt), "answer": record.answer}) for record in data.records
        ]
        (folder / name).write_text("\n".join(lines[: max(RIGHT, PROMPTS * iterations)]) + "\n")
    return {
        "peers": str(PEERS),
        "rewards": str(REWARDS),
        "model": values["model"],
        "data": str(folder / "data"),
        "held_out": str(folder / "held_out"),
        "prompts": PROMPTS,
        "samples": values["hp.samples"],
        "tokens": values["hp.max_tokens"],
        "lr": RATE,
        "beta2": values["beta2"],
        "seed": 0,
        "iterations": iterations,
    }


def trained(python: str, folder: Path, values: dict[str, Any]) -> list[dict[str, float]]:
    """Run `silent_trl.py` and return its output, one object per line. If it fails, exits this program."""
    done = subprocess.run(
        [python, "-P", str(HERE / "silent_trl.py"), json.dumps(values)],
        cwd=folder,
        env=environment(python),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"TRL exited with code {done.returncode}:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{") and '"' in line[:2]]


def compare_trl(iterations: int) -> None:
    """Train with TRL without and with the fault, and print the two logs side by side."""
    python = interpreter(PEERS / "trl.py", print)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values = settings(folder, iterations)
        sound, faulty = (
            trained(python, folder, {**values, "function": function})
            for function in ("trl_in_order", "trl_misplaced")
        )
    for title, words in (("TRL GRPOTrainer", LOGGED), ("iteration", ("sound  faulty",) * len(LOGGED))):
        print(f"{title:<18}" + "  ".join(f"{word:>15}" for word in words))
    steps = [[line for line in lines if "loss" in line] for lines in (sound, faulty)]
    # TRL logs some numbers as text
    for number, (one, other) in enumerate(zip(*steps, strict=True), 1):
        print(
            f"{number:<18}"
            + "  ".join(f"{float(one[name]):7.3f} {float(other[name]):7.3f}" for name in LOGGED)
        )
    for what, lines in (("sound", sound), ("faulty", faulty)):
        print(
            f"right answers of {RIGHT} held-out questions, {what}: {lines[-1]['before']:.1%} → "
            f"{lines[-1]['after']:.1%}"
        )


def proved(function: str) -> int:
    """Run `rlflow prove grpo` with a reward function. It prints the claims. Returns the exit code."""
    command = ["prove", "grpo", "--reward", f"{REWARDS}:{function}", "--held_out", "0"]
    print(f"\n$ rlflow {' '.join(command).replace(str(HERE), os.path.relpath(HERE))}", flush=True)
    return subprocess.run([sys.executable, "-m", "rlflow.cli.main", *command]).returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=20, help="iterations of each TRL training")
    parser.add_argument("--only", choices=("trl", "rlflow"))
    options = parser.parse_args()
    if options.only != "rlflow":
        compare_trl(options.iterations)
    if options.only != "trl":
        codes = [proved(function) for function in ("reward_misplaced", "reward_in_order")]
        print(f"\nexit codes: {codes[0]} with the fault, {codes[1]} without it")
        sys.exit(0 if codes == [2, 0] else 1)


if __name__ == "__main__":
    main()
