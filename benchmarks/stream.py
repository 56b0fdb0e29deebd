"""Measure the time of a PPO iteration that scores rows in chunks while long responses are still sampled.

    python benchmarks/stream.py [--chunks 1 2 4 8] [--iterations 8]

The run has two pools and no model. The null backend waits for declared times: per sampled token of all active
rows, per row of a forward pass, and per update. A reward function sleeps for each row. Lengths follow the
fourth power of a uniform number: half of the rows end within a sixteenth of the longest.

The table also shows the scheduler's time for the same durations in virtual time, without costs of calls and
transfers. Compare the fastest iterations. Nearly all time is waiting, so they were disturbed least by other
work on the machine.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

# seconds of a sampling step, of a row in a forward, of an update, and of a row in the reward
TOKEN, ROW, UPDATE, JUDGED = 0.01, 0.01, 0.3, 0.02
PROCESSES = 2  # reward processes of a worker
TOKENS, PROMPTS, SAMPLES = 200, 16, 4
ROWS = PROMPTS * SAMPLES


def judge(completion: str) -> float:
    """Return the reward of a row after a sleep."""
    time.sleep(JUDGED)
    return len(completion) % 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--iterations", type=int, default=8)
    given = parser.parse_args()
    print(
        "| chunks | fastest iteration, s | median, s | fastest ÷ one chunk | virtual time, s | "
        "last row to update, s |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    first = None
    for chunks in given.chunks:
        took, after, virtual = measured(chunks, given.iterations)
        first = first or min(took)
        cells = (min(took), statistics.median(took), min(took) / first, virtual, min(after))
        print(f"| {chunks} | {' | '.join(f'{cell:.2f}' for cell in cells)} |", flush=True)


def measured(chunks: int, iterations: int) -> tuple[list[float], list[float], float]:
    """Measure iterations that score rows in ``chunks`` chunks.

    Returns (seconds of each iteration, seconds from each iteration's last sampled row to its first update,
    seconds of an iteration in virtual time).
    """
    import rlflow

    roles = rlflow.roles(
        "ppo",
        backend="null",
        reward=[f"{__file__}:judge"],
        reward_workers=PROCESSES,
        prompts=PROMPTS,
        iterations=iterations + 1,
        stream=chunks,
        pools="train=1,rollout=1",
        threads=1,
        **{"hp.samples": SAMPLES, "hp.max_tokens": TOKENS},
        **{"actor.token_seconds": TOKEN, "actor.longest": TOKENS, "actor.tail": 4.0},
        row_seconds=ROW,
        update_seconds=UPDATE,
    )
    prepared, made = roles.prepared, []
    # use the same prompts each time, since they give the same lengths
    prompts = prepared.prompts.take(PROMPTS)
    try:
        for iteration in range(iterations + 1):
            prepared.engine.iteration = iteration
            made.append(prepared.executor.run(prepared.plan, prompts))
    finally:
        roles.close()
    spans = [outcome.spans for outcome in made[1:]]
    took = [max(span.end for span in each) - min(span.start for span in each) for each in spans]
    lengths = made[0].records["tokens"].data["tokens"].lengths.sort().values.tolist()
    return took, [left(each) for each in spans], virtual(prepared.plan, lengths)


def left(spans: list) -> float:
    """Return the seconds from the last sampled row to the first update."""
    sampled = max(span.end for span in spans if span.node == "actor.generate")
    return min(span.start for span in spans if span.node.endswith(".update")) - sampled


def virtual(plan, lengths: list[int]) -> float:
    """Return the plan's seconds in virtual time.

    ``lengths``: the response length of each row, in ascending order.
    """
    from rlflow.compiler.graph.model import Op
    from rlflow.compiler.passes.queues import room_of
    from rlflow.compiler.simulate import simulate

    seconds = {
        Op.GENERATE: TOKEN * lengths[-1],
        Op.LOGPROBS: ROW * ROWS,
        Op.VALUES: ROW * ROWS,
        Op.UPDATE: UPDATE,
        Op.REWARD: JUDGED * ROWS / PROCESSES,
    }

    def ended(rows: float) -> float:
        return lengths[math.ceil(rows * len(lengths)) - 1] / lengths[-1]

    timed: Callable = lambda node: seconds.get(node.op, 0.0)  # noqa: E731
    return simulate(plan, timed, room_of(plan.placement), ended).makespan


if __name__ == "__main__":
    main()
