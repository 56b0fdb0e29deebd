"""What scoring in chunks gives where a few responses are much longer than the rest: an iteration of PPO on
two pools, with no model.

    python benchmarks/stream.py [--chunks 1 2 4 8] [--iterations 8]

The null backend takes declared times: a token of all rows under way, a row of a forward, an update; a reward
function sleeps for each row. Lengths are those of the fourth power of a uniform number: half of the rows end
within a sixteenth of the longest. Beside what was measured stands what the scheduler does in virtual time
with the same durations, in which calls and transfers cost nothing. Nearly all is waiting, so the fastest
iteration, which other work on the machine disturbed least, is the one to compare.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

# seconds: a step of sampling; a row of a forward; an update; a row of the reward
TOKEN, ROW, UPDATE, JUDGED = 0.01, 0.01, 0.3, 0.02
PROCESSES = 2  # of a worker\'s rewards
TOKENS, PROMPTS, SAMPLES = 200, 16, 4
ROWS = PROMPTS * SAMPLES


def judge(completion: str) -> float:
    time.sleep(JUDGED)
    return len(completion) % 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--iterations", type=int, default=8)
    given = parser.parse_args()
    print(
        "| chunks | iteration, fastest, s | median, s | fastest, of one chunk | in virtual time, s | "
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
    """Seconds of each iteration, and from its last row to its first update; and those of one in virtual
    time."""
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
        **{"row_seconds": ROW, "update_seconds": UPDATE},
    )
    prepared, made = roles.prepared, []
    prompts = prepared.prompts.take(PROMPTS)  # the same each time, and so the same lengths
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
    sampled = max(span.end for span in spans if span.node == "actor.generate")
    return min(span.start for span in spans if span.node.endswith(".update")) - sampled


def virtual(plan, lengths: list[int]) -> float:
    """The same plan in virtual time, for rows of these lengths, ascending."""
    from rlflow.compiler.graph.model import Op
    from rlflow.compiler.passes.lanes import room_of
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
