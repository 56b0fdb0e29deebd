"""The planned column transfers match what ranks of a run on pools send each other."""

from collections import Counter

import pytest

import rlflow
from rlflow.author.load import load_flow
from rlflow.cluster.rpc.message import Call
from rlflow.cluster.rpc.pool import Pool
from rlflow.execution.wire.row_bytes import opened

FLAGS = "--pools train=2,rollout=2 --prompts 8 --hp.samples 2 --hp.max_tokens 16"
TARGETS = {
    "actor": {
        "generate": "actor.generate",
        "forward": "actor.logprobs",
        "facts": "actor.update",
        "update": "actor.update",
    },
    "reward": {"reward": "reward"},
}


@pytest.fixture
def sent(monkeypatch):
    """Yield (iteration, node, sending pool, receiving pool, batch) for each transfer between ranks for a
    node's call.
    """
    moved, senders = [], {}
    send = Pool.send

    def sending(self, rank, method, *args, **keywords):
        ref = send(self, rank, method, *args, **keywords)
        if method == "slice":
            senders[ref] = self.name
        return ref

    def running(run):
        def watched(self, rank, frame, transfers, group):
            call = Call.unpacked(frame)
            node = TARGETS.get(call.arguments.get("role"), {}).get(call.op) or call.arguments.get("function")
            for ref in call.rows(transfers) if node else ():
                [rows] = self.transport.values([ref], 60.0)
                moved.append((call.iteration, node, senders[ref], self.name, opened(rows)))
            return run(self, rank, frame, transfers, group)

        return watched

    monkeypatch.setattr(Pool, "send", sending)
    for name in ("run", "run_chunks"):
        monkeypatch.setattr(Pool, name, running(getattr(Pool, name)))
    return moved


def test_planned_transfers_match_the_sent_columns(planned_as, sent, tmp_path):
    rlflow.run(
        load_flow("grpo"),
        backend="null",
        pools="train=2@threads,rollout=2@threads",
        prompts=8,
        iterations=2,
        out=str(tmp_path),
        **{"hp.samples": 2, "hp.max_tokens": 16},
    )
    moved = Counter()
    for iteration, node, source, target, batch in sent:
        if iteration == 1 and source != target:
            moved.update({(node, source, target, name): len(batch) for name in batch.columns})
    within = {
        (node, name) for _, node, source, target, batch in sent if source == target for name in batch.columns
    }
    planned = planned_as(f"grpo {FLAGS}").edges
    rows = {
        (edge.target, edge.from_pool, edge.to_pool, name): edge.moved * 16 // edge.bytes
        for edge in planned
        if edge.why == "pool"
        for name in edge.columns
    }
    assert moved == dict.fromkeys(rows, 16)  # each row comes from the other pool once
    assert (
        len({(*pools, name) for _, *pools, name in moved}) == len(moved) == 8
    )  # however many nodes read it there
    assert rows["actor.logprobs", "rollout", "train", "tokens"] == 16 // 2  # whole numbers travel as int32
    of_floats = {
        place: count
        for place, count in rows.items()
        if place[-1] in ("logprobs", "advantages", "weights", "scores")
    }
    # half of the rows of an update then go to the learning rank
    assert of_floats == {place: 24 if place[0] == "actor.update" else 16 for place in of_floats}
    split = {(edge.target, name) for edge in planned if edge.why == "split" for name in edge.columns}
    assert split == {
        ("actor.update", name) for name in ("logprobs", "prompt_tokens", "tokens", "temperature")
    }
    assert split <= within
