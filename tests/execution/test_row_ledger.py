"""Causes of rows without an update: failed episodes are distinguished from non-finite columns."""

import torch

from rlflow import flow, loss
from rlflow.author.batch import Batch
from rlflow.compiler.graph.model import Op
from rlflow.compiler.trace.compile import compile_flow
from rlflow.execution.account import RowOutcome
from rlflow.execution.row_ledger import Ledger, UpdateRows


@loss
def likelihood(new, scores):
    return -new.logprobs * scores[:, None], {}


@flow
def played(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    actor.update(batch, likelihood)


def test_an_unscored_row_names_its_failed_episode():
    graph = compile_flow(played).graph
    generate, update = (
        next(node for node in graph.nodes if node.op is op) for op in (Op.GENERATE, Op.UPDATE)
    )
    rows = Batch.of(tokens=[[1, 2], [3], [4, 5, 6], [7], [8, 9]])
    ledger = Ledger(graph, {generate.rows_axis: rows.axis})
    ledger.sampled(generate, rows)
    ledger.failed[generate.id] = ["timeout", "", "raised", "timeout", ""]
    ledger.updates[update.id] = UpdateRows(torch.tensor([1, 0, 1, 1, 1]), ("scores",))
    account = ledger.account()
    assert account.closes
    ends = {(end.fate, end.cause): (count.rows, count.tokens) for (_, end), count in account.ends.items()}
    assert ends == {
        (RowOutcome.TRAINED, ""): (1, 1),
        (RowOutcome.LEFT_OUT, "episode failed: timeout"): (2, 3),
        (RowOutcome.LEFT_OUT, "episode failed: raised"): (1, 3),
        (RowOutcome.LEFT_OUT, "scores is not finite"): (1, 2),
    }
