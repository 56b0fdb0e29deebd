"""Independent work runs at the same time on disjoint pools, and the run reports it: the timeline and the
bound of the run."""

import json
from itertools import combinations, pairwise

import pytest

import rlflow

FORWARDS = ("actor.logprobs", "reference.logprobs", "critic.values", "reward")
# seconds that calls of the null backend take, whatever else the machine does
GENERATE, FORWARD, UPDATE = 0.2, 1.0, 0.6
REWARD = f"import time\n\ndef slow(completion):\n    time.sleep({FORWARD})\n    return 1.0\n"


def together(spans, names):
    return all(
        max(spans[a][0], spans[b][0]) < min(spans[a][1], spans[b][1]) for a, b in combinations(names, 2)
    )


def slices(events, rank):
    """Return when each node ran, as seen by the driver or on its rank."""
    return {
        event["name"]: (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event["ph"] == "X" and (event["cat"] == "rank") == rank and event["args"].get("op", "") != "facts"
    }


@pytest.mark.slow
def test_ppo_overlaps_independent_work_on_disjoint_pools(tmp_path):
    (tmp_path / "judge.py").write_text(REWARD)
    result = rlflow.run(
        "ppo",
        backend="null",
        prompts=2,
        iterations=1,
        out=str(tmp_path),
        reward=[f"{tmp_path}/judge.py:slow"],
        pools="a=1@threads,b=1@threads,c=1@threads",
        generate_seconds=GENERATE,
        forward_seconds=FORWARD,
        update_seconds=UPDATE,
        **{"actor.pool": "a", "critic.pool": "b", "reference.pool": "c", "hp.max_tokens": 4},
    )
    events = json.loads((result.folder / "timeline.json").read_text())
    for spans in (slices(events, rank=False), slices(events, rank=True)):
        assert together(spans, FORWARDS), spans
        assert together(spans, ("actor.update", "critic.update")), spans
        assert spans["actor.generate"][1] <= min(spans[name][0] for name in FORWARDS)

    rows = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    assert all(a[1] <= b[0] + 1 for row in rows.values() for a, b in pairwise(sorted(row)))
    assert [
        event["args"]["name"]
        for event in sorted(events, key=lambda event: event["pid"])
        if event["name"] == "process_name"
    ] == ["pool a", "pool b", "pool c"]

    bounds = result.totals.bounds
    assert json.loads((result.folder / "bounds.json").read_text()) == result.totals.as_json()
    assert GENERATE + FORWARD + UPDATE <= bounds.bound <= bounds.seconds
    assert next(iter(bounds.critical)) == "actor.generate"
    # the last of the concurrent nodes to end
    assert len({*FORWARDS} & bounds.critical.keys()) == 1
    assert bounds.busy["b"] >= (FORWARD + UPDATE) / bounds.seconds > bounds.busy["c"] > 0


@pytest.mark.slow
def test_pools_that_share_a_processor_share_a_bundle(tmp_path, ray_address, monkeypatch):
    from rlflow.cluster import launch

    placed, place = [], launch.place_pools

    def placing(*words):
        placed.append(place(*words))
        return placed[-1]

    monkeypatch.setattr(launch, "place_pools", placing)
    flags = {
        "backend": "null",
        "prompts": 4,
        "iterations": 1,
        "hp.max_tokens": 4,
        "actor.pool": "a",
        "reference.pool": "a",
        "critic.pool": "b",
    }
    alone = rlflow.run("ppo", out=str(tmp_path / "alone"), ray_address=ray_address, pools="a=2,b=2", **flags)
    result = rlflow.run(
        "ppo",
        out=str(tmp_path / "shared"),
        ray_address=ray_address,
        pools="a=2@cpu0.5,b=2@cpu0.5",
        forward_seconds=FORWARD,
        **flags,
    )
    assert placed[0]["a"] is not placed[0]["b"]
    assert placed[1]["a"] is placed[1]["b"]
    assert placed[1]["a"].bundle_specs == [{"CPU": 1.0}, {"CPU": 1.0}]
    spans = slices(json.loads((result.folder / "timeline.json").read_text()), rank=True)
    assert together(spans, ("actor.logprobs", "critic.values")), spans
    numbers = [
        json.loads((each.folder / "metrics.jsonl").read_text().splitlines()[0]) for each in (alone, result)
    ]
    timed = ("seconds", "response/tokens_per_second")
    first, second = ({name: value for name, value in each.items() if name not in timed} for each in numbers)
    assert second == pytest.approx(first, rel=1e-9, nan_ok=True)
