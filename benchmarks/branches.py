"""Measure the cost of sampling if all rows of a prompt share one copy of the prompt's keys and values.

Without sharing, each row has its own copy.

    python benchmarks/branches.py [--model FOLDER] [--rounds 3]

Each row of the table has a maximum response length. Responses are random tokens, of half that length to the
full length. The computation uses float32 and one thread. Both variants alternate in one process. The table
shows the minimum of the CPU seconds over --rounds. The default model is the one of `rlflow bench peers`: a
Qwen3 with 0.8M parameters.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from rlflow.author.seeds import uniforms
from rlflow.backends.local import Generator
from rlflow.backends.local.decode import decode
from rlflow.backends.local.endings import Endings
from rlflow.benchmarks.suites.fixed_shape import make
from rlflow.training.protocols import ModelSpec, Sampling

SHAPES = [
    (16, 12, 2, 16),
    (8, 12, 8, 16),
    (8, 46, 8, 12),
    (4, 190, 2, 64),
    (4, 190, 4, 128),
    (4, 190, 8, 64),
    (4, 190, 8, 256),
]


def sampled(generator: Generator, shape: tuple[int, int, int, int], shared: bool) -> float:
    """Return the CPU seconds used by sampling.

    ``shape``: (prompts, tokens per prompt, samples per prompt, maximum number of tokens per response).
    ``shared``: whether the rows of a prompt share its keys and values.
    """
    prompts, width, samples, longest = shape
    rng, rows = torch.Generator().manual_seed(0), prompts * samples
    ids = [torch.randint(3, 300, (width - number % 5,), generator=rng) for number in range(prompts)]
    lengths = torch.randint(longest // 2, longest + 1, (rows,), generator=rng)
    ends = Endings(torch.tensor(generator.eos), (), generator.tokenizer, 0, lengths)
    of, chances = torch.arange(prompts).repeat_interleave(samples), uniforms(list(range(rows)), longest)
    begin = time.process_time()
    for _ in decode(
        generator.network, ids, of, chances, Sampling(samples=samples, max_tokens=longest), ends, 1, shared
    ):
        pass
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if given.model is None:
            make(Path(folder))
        generator = Generator(
            ModelSpec(given.model or Path(folder) / "model", "logprobs", False, "cpu", "float32", 0)
        )
        print(
            "| prompts × tokens, samples × maximum tokens | a copy for each row, s | shared, s | ratio |\n| "
            "--- | ---: | ---: | ---: |"
        )
        for shape in SHAPES:
            turns = [
                [sampled(generator, shape, shared) for shared in (False, True)] for _ in range(given.rounds)
            ]
            copied, shared = (min(times) for times in zip(*turns, strict=True))
            prompts, width, samples, longest = shape
            print(
                f"| {prompts} × {width}, {samples} × {longest} | {copied:.3f} | {shared:.3f} | "
                f"{shared / copied:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
