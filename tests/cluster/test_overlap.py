"""What does not wait for one another runs at the same time on disjoint pools, and the run says so: its timeline and what bounded it."""

import json
from itertools import combinations, pairwise

import pytest

import rlflow

FORWARDS = ("actor.logprobs", "reference.logprobs", "critic.values", "reward")
GENERATE, FORWARD, UPDATE = 0.2, 1.0, 0.6  # seconds that calls of the null backend take, whatever else the machine does
REWARD = f"import time\n\ndef slow(completion):\n    time.sleep({FORWARD})\n    return 1.0\n"


def together(spans, names):
    return all(max(spans[a][0], spans[b][0]) < min(spans[a][1], spans[b][1]) for a, b in combinations(names, 2))


def slices(events, rank):
    """From when to when each node ran, as the driver saw it or on its rank."""
    return {event["name"]: (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events
            if event["ph"] == "X" and (event["cat"] == "rank") == rank and event["args"].get("op", "") != "facts"}


@pytest.mark.slow
def test_the_forwards_and_the_reward_of_ppo_overlap_on_disjoint_pools_and_so_do_the_updates(tmp_path, ray_address):
    (tmp_path / "judge.py").write_text(REWARD)
    result = rlflow.run("ppo", backend="null", prompts=2, iterations=1, out=str(tmp_path), ray_address=ray_address,
                        reward=[f"{tmp_path}/judge.py:slow"], pools="a=1,b=1,c=1", generate_seconds=GENERATE, forward_seconds=FORWARD,
                        update_seconds=UPDATE, **{"actor.pool": "a", "critic.pool": "b", "reference.pool": "c", "hp.max_tokens": 4})
    events = json.loads((result.folder / "timeline.json").read_text())
    for spans in (slices(events, rank=False), slices(events, rank=True)):
        assert together(spans, FORWARDS), spans
        assert together(spans, ("actor.update", "critic.update")), spans
        assert spans["actor.generate"][1] <= min(spans[name][0] for name in FORWARDS)

    rows = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert all(a[1] <= b[0] + 1 for row in rows.values() for a, b in pairwise(sorted(row)))
    assert [event["args"]["name"] for event in sorted(events, key=lambda event: event["pid"]) if event["name"] == "process_name"] == [
        "pool a", "pool b", "pool c"]

    bounds = result.totals.bounds
    assert json.loads((result.folder / "bounds.json").read_text()) == result.totals.as_json()
    assert GENERATE + FORWARD + UPDATE <= bounds.bound <= bounds.seconds
    assert [*bounds.critical][0] == "actor.generate"
    assert len({*FORWARDS} & bounds.critical.keys()) == 1  # of those that ran beside one another the last to end
    assert bounds.busy["b"] >= (FORWARD + UPDATE) / bounds.seconds > bounds.busy["c"] > 0
