"""What a plan says of columns that move is what a run on pools moves."""

import pickle
from collections import Counter

import pytest

import rlflow
from rlflow.author.load import load_flow
from rlflow.cluster.calls import Calls

FLAGS = "--pools train=2,rollout=2 --prompts 8 --hp.samples 2 --hp.max_tokens 16"
TARGETS = {"actor": {"generate": "actor.generate", "forward": "actor.logprobs", "facts": "actor.update", "update": "actor.update"},
           "reward": {"reward": "reward"}}  # fmt: skip


@pytest.mark.slow
def test_columns_that_move(planned_as, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "local")  # a Ray of its own, whatever else runs here
    moved, within, rows_of = Counter(), set(), {}
    shard, on, ask = (getattr(Calls, name) for name in ("_shard", "_on", "ask"))

    def sharded(self, at, key, rows):
        rows_of[key] = rows
        return shard(self, at, key, rows)

    def note(self, pool, op, told, request):
        target = TARGETS.get(told.get("role"), {}).get(op) or told.get("function")
        for transfer in request.transfers if target else ():
            if transfer.at.pool == pool.name:
                within.update((target, name) for name in transfer.names)
            elif self.iteration == 1:
                count = len(transfer.rows) if transfer.rows is not None else rows_of[transfer.key]
                moved.update({(target, transfer.at.pool, pool.name, name): count for name in transfer.names})

    def on_some(self, pool, op, requests, arguments, *terms):
        for request in requests.values():
            note(self, pool, op, arguments, request)
        return on(self, pool, op, requests, arguments, *terms)

    def asked(self, pool, rank, op, routes, rows, arguments, *group):
        note(self, pool, op, pickle.loads(arguments), routes.to(rows, pool.at(rank)))
        return ask(self, pool, rank, op, routes, rows, arguments, *group)

    for name, watched in {"_shard": sharded, "_on": on_some, "ask": asked}.items():
        monkeypatch.setattr(Calls, name, watched)
    rlflow.run(load_flow("grpo"), backend="null", pools="train=2,rollout=2", prompts=8, iterations=2, out=str(tmp_path),
               **{"hp.samples": 2, "hp.max_tokens": 16})
    found = planned_as(f"grpo {FLAGS}").edges
    told = {(edge.target, edge.from_pool, edge.to_pool, name): edge.moved * 16 // edge.bytes
            for edge in found if edge.why == "pool" for name in edge.columns}  # fmt: skip
    assert len(told) == 11
    assert moved == dict.fromkeys(told, 16)  # each row comes from the other pool once
    assert told == {place: 24 if place[0] == "actor.update" else 16 for place in told}  # then half of them go to the rank that learns
    split = {(edge.target, name) for edge in found if edge.why == "split" for name in edge.columns}
    assert split == {("actor.update", "logprobs")}
    assert split <= within
