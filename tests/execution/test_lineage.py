"""Rows made from rows: follow-ups, choices, joins and merges. They are the same eagerly and compiled; groups
and randomness depend on the axis.
"""

import re
from pathlib import Path

import pytest
import torch
from sources import TASKS

import rlflow
from rlflow import FlowError, PlanError, ask, concat, flow
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.author.load import load
from rlflow.author.node_options import ConcatOptions
from rlflow.compiler.passes import plan
from rlflow.compiler.trace.compile import compile_flow
from rlflow.errors import StageError
from rlflow.execution.account import RowOutcome
from rlflow.execution.follow_ups import Asking
from rlflow.execution.lineage import cut_rows, joined_rows, whole_completions

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not

LINEAGE = load(Path(__file__).parent / "lineage.py")
MODEL = TASKS / "arithmetic_model"
NAMES = [
    "critique",
    "correction",
    "debate",
    "raft",
    "marked",
    "harder",
    "vine",
    "redone",
    "taught",
    "reviewed",
    "demonstrated",
]


@pytest.mark.parametrize("name", NAMES)
def test_eager_and_compiled_learn_from_the_same_rows(world, name):
    eager, compiled = world(getattr(LINEAGE, name)), world(getattr(LINEAGE, name))
    for _ in range(3):
        eager.eager(5)
        outcome = compiled.compiled(5)
        assert outcome.account.closes
        assert not compiled.executor.store.columns
    assert eager.learned
    assert compiled.learned == eager.learned
    assert compiled.stream.position == eager.stream.position


def rows_of(world, flow, count, node):
    """Return the batch of a node in one compiled iteration."""
    run, seen = world(flow), {}
    put = type(run.executor.store).put

    def spied(self, of, batch, names):
        seen.setdefault(of.name, batch)
        return put(self, of, batch, names)

    run.executor.store.__class__.put = spied
    try:
        run.compiled(count)
    finally:
        run.executor.store.__class__.put = put
    return seen[node]


def test_follow_up_rows_are_grouped_by_their_own_samples(world):
    second = rows_of(world, LINEAGE.critique, 3, "verifier.generate")
    assert second.axis.groups * 2 == len(second)
    assert second["group"].tolist() == [i // 2 for i in range(len(second))]
    assert len(set(map(tuple, second.axis.keys.tolist()))) == len(second)


def test_groups_of_joined_rows_stay_separate_and_are_renumbered(world):
    both = rows_of(world, LINEAGE.correction, 3, "concat")
    assert len(both) == 12
    assert both["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8]
    assert both.axis.slots.tolist() == both["group"].tolist()


def test_rows_joined_by_prompts_share_the_groups_of_their_prompts(world):
    both = rows_of(world, LINEAGE.demonstrated, 6, "concat")
    assert both["group"].tolist() == both.axis.slots.tolist()
    prompts = both.axis.keys[:, 0].tolist()
    assert prompts == sorted(prompts)
    assert both["group"].tolist() == [sorted({*prompts}).index(position) for position in prompts]
    order = list(zip(prompts, both["part"].tolist(), strict=True))
    assert order == sorted(order)
    assert {part for _, part in order} == {0, 1, 2}
    sampled = both["part"] == 0
    assert bool((both["sampled_logprobs"][~sampled] == 0).all())
    assert bool((both["sampled_logprobs"][sampled][:, 0] < 0).all())


def test_a_column_is_filled_for_the_rows_that_lack_it():
    first = Batch.of(tokens=[[1, 2], [3]], good=[True, False], note=["a", "b"], values=[[0.5, 1.0], [2.0]])
    second = Batch.of(tokens=[[4, 5, 6], []], score=[0.5, 1.5])
    fill = (("values", -1), ("good", True), ("note", "?"), ("score", float("nan")))
    both = joined_rows([first, second], ConcatOptions(fill=fill))
    assert both.data["values"].lists() == [[0.5, 1.0], [2.0], [-1.0, -1.0, -1.0], []]
    assert both["good"].tolist() == [True, False, True, True]
    assert both["note"] == ["a", "b", "?", "?"]
    assert both["score"].isnan().tolist() == [True, True, False, False]
    assert both["part"].tolist() == [0, 0, 1, 1]
    assert both.data["values"].value.dtype is torch.float32


@pytest.mark.parametrize(
    ("fill", "says"),
    [
        ({"values": "x"}, "cannot fill column 'values' with 'x'"),
        ({"values": True}, "cannot fill column 'values' with True"),
        ({"prompt_tokens": 1}, "cannot fill column 'prompt_tokens' with 1"),
        ({"value": 1.0}, "fills column 'value', but none of the batches has it"),
        ({"values": 1.0}, "needs column 'tokens'"),
    ],
)
def test_a_column_that_cannot_be_filled_is_refused(fill, says):
    first = Batch.of(values=[[0.5, 1.0]], prompt_tokens=[[1]], scores=[1.0])
    with pytest.raises(FlowError, match=says):
        concat(first, Batch.of(scores=[2.0]), fill=fill)


def test_rows_of_other_prompts_do_not_join_groups():
    with pytest.raises(FlowError, match="needs rows that were made from the same prompts"):
        concat(Batch.of(scores=[1.0]), Batch.of(scores=[2.0]), groups="prompts")


def test_a_graph_has_the_part_of_joined_rows_only_if_something_reads_it():
    def parts(flow):
        return [o.name for o in compile_flow(flow).graph.by_name["concat"].outputs if o.name == "part"]

    assert parts(LINEAGE.correction) == []
    assert parts(LINEAGE.demonstrated) == ["part"]


def test_rows_of_a_group_stay_a_group_after_a_join():
    asked = Axis.fresh(2).repeat(1).ask(torch.tensor([0, 1])).repeat(3)
    both = Axis.join([Axis.fresh(1).repeat(2), asked])
    assert both.slots.tolist() == both.group_numbers.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert both.take(torch.tensor([1, 3, 4, 7])).slots.tolist() == [0, 1, 1, 2]


def test_every_sampled_row_has_one_outcome_in_its_history(world):
    run = world(LINEAGE.critique)
    account = run.compiled(6).account
    assert account.sampled["solver.generate"].rows == 16
    assert account.sampled["verifier.generate"].rows == 32
    assert account.of(RowOutcome.TRAINED, "solver.update").rows == 16
    assert account.of(RowOutcome.TRAINED, "verifier.update").rows == 32
    account = world(LINEAGE.raft).compiled(3).account
    assert account.of(RowOutcome.TRAINED).rows == 3
    assert {
        (end.node, end.cause, end.setting): count.rows
        for (_, end), count in account.ends.items()
        if end.fate is RowOutcome.LEFT_OUT
    } == {("choose", "not chosen", "count=1"): 9}
    account = world(LINEAGE.correction).compiled(3).account
    assert account.of(RowOutcome.TRAINED, "actor.update").rows == 12


def test_unread_columns_of_joined_rows_are_not_computed():
    made = plan(compile_flow(LINEAGE.correction))
    node = made.graph.by_name["concat"]
    assert "policy_version" not in made.keeps(node)
    assert {"tokens", "advantages"} <= set(made.keeps(node))


def test_a_seed_depends_on_the_position_in_the_lineage(world):
    second = rows_of(world, LINEAGE.debate, 3, "one.generate#2")
    texts = [tuple(row.tolist()) for row in second["tokens"]]
    assert len(set(texts)) > len(texts) // 2
    assert torch.equal(second["tokens"], rows_of(world, LINEAGE.debate, 3, "one.generate#2")["tokens"])


def test_a_continuation_from_a_token_gives_a_value_at_the_token(world):
    run, seen = world(LINEAGE.vine), {}
    perform = type(run.engine).stage

    def spied(self, stage, batch, *rest):
        seen.setdefault(stage.name, batch)
        return perform(self, stage, batch, *rest)

    type(run.engine).stage = spied
    try:
        run.compiled(3)
    finally:
        type(run.engine).stage = perform
    asked, values = seen["mean_score"], seen["gain_of_steps"]["value"]
    mask = seen["steps"]["mask"]
    expected = [[i, t] for i in range(6) for t in range(0, int(mask[i].sum()), 2)]
    assert values.isnan().logical_not().logical_and(mask).nonzero().tolist() == expected
    assert len(asked) == 3 * len(expected)
    mean = asked["scores"].reshape(-1, 3).double().mean(1).float()
    assert torch.equal(values[mask & ~values.isnan()], mean)


BYTES = {
    "prompt_tokens": [[1, 2], [3]],
    "tokens": [[104, 195, 164], [105, 106]],
    "completion": ["h\u00e4", "ij"],
}


@pytest.mark.parametrize(
    ("until", "prompts", "lengths"),
    [
        ([2, 0], [[1, 2, 104, 195], [3]], [2, 0]),
        ([[True, False, True], [False, True]], [[1, 2], [1, 2, 104, 195], [3, 105]], [0, 2, 1]),
        ([[False] * 3, [False] * 2], [], []),
    ],
)
def test_a_prefix_is_the_prompt_and_the_first_ids_of_the_response(until, prompts, lengths):
    asked, places = cut_rows(Batch.of(BYTES, until=until))
    assert asked.data["prompt_tokens"].lists() == prompts
    assert asked["prefix_length"].tolist() == places.tolist() == lengths
    again, _ = cut_rows(Batch.of(BYTES, until=until, prefix_length=[1, 1]))
    assert again["prefix_length"].tolist() == [length + 1 for length in lengths]


def test_a_prefix_longer_than_its_row_is_refused():
    for number in (-1, 3):
        with pytest.raises(
            ValueError,
            match=f"found {number} for a row of 2 tokens, expected a number from 0 to the length of the row",
        ):
            cut_rows(Batch.of(BYTES, until=[1, number]))


def test_the_completion_joins_a_character_split_between_tokens():
    asked, _ = cut_rows(Batch.of(BYTES, until=[2, 1]))
    rows = asked.repeat(1)
    sampled = Batch.of(tokens=[[164, 33, 0], [33, 33]], completion=["\ufffd!", "!!"])
    rows = Batch(rows.axis, sampled.data)
    decode = lambda ids: [bytes(row).decode(errors="replace").removesuffix("\0") for row in ids]  # noqa: E731
    assert whole_completions(decode, asked, rows)["completion"] == ["h\u00e4!", "i!!"]


def test_a_text_after_the_tokens_keeps_the_sampled_ids(world):
    rows = Batch.of(BYTES, text=["no", "yes"])
    asked, metrics = world(LINEAGE.redone).engine.ask(rows, ())
    assert asked.data["prompt_tokens"].lists() == [[1, 2, 104, 195, 164, *b"no"], [3, 105, 106, *b"yes"]]
    assert asked["prompt"] == ["no", "yes"]
    assert metrics["too_long"].value == 0


def test_overlong_prefixes_are_skipped(world):
    engine = world(LINEAGE.vine).engine
    engine.asking = Asking(longest=2)
    asked, metrics = engine.ask(Batch.of(BYTES, until=[[True, True, True], [True, True]]), ())
    assert metrics["too_long"].value == 2
    assert asked.axis.index.tolist() == [0, 1, 1]
    assert asked.axis.cut.place.tolist() == [0, 0, 1]
    assert asked.axis.cut.lengths.tolist() == [3, 2]


def test_eager_follow_ups_within_a_response_keep_their_prompt(
    world,
):
    seen = {}

    @flow
    def asking(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=6)
        seen["within"] = ask(batch | LINEAGE.steps(batch), tokens_until="step")
        seen["anew"] = ask(batch | LINEAGE.ask_again(batch, word="again"), "question")
        actor.update(actor.generate(seen["anew"], max_tokens=3), LINEAGE.likelihood)

    world(asking).eager(3)
    assert set(seen["within"]["prompt"]) <= {"p0", "p1", "p2"}
    assert len(set(seen["within"]["prompt"])) == 3
    assert all(text.startswith("again ") for text in seen["anew"]["prompt"])


def asking_again(tmp_path, given, **settings):
    """Return a run of a flow that asks again with ``given`` for the completion c."""
    source = (Path(__file__).parent / "lineage.py").read_text()
    (tmp_path / "asks.py").write_text(
        source.replace('return [f"{word} {c}" for c in completion]', f"return [{given} for c in completion]")
    )
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 2)
    return rlflow.run(
        f"{tmp_path}/asks.py::correction",
        iterations=1,
        prompts=2,
        held_out=0,
        out=str(tmp_path),
        data=f"{tmp_path}/sums.jsonl",
        reward="task",
        **settings,
    )


def test_messages_without_a_chat_template_are_refused_at_the_flow_line(tmp_path):
    with pytest.raises(PlanError, match="has no chat template") as caught:
        asking_again(tmp_path, "[{'role': 'user', 'content': c}]", model=str(MODEL))
    (problem,) = caught.value.problems
    assert Path(problem.place.path).name == "asks.py"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("[{'rol': 'user', 'content': c}]", "{'rol': 'user'"),
        ("[]", "[]"),
        ("[{'role': 'user', 'content': c}, 7]", "found 7 in row 0"),
        ("7", "found 7 in row 0"),
    ],
)
def test_an_invalid_follow_up_is_reported_with_its_row(tmp_path, given, names):
    with pytest.raises(StageError, match=re.escape(names)) as caught:
        asking_again(tmp_path, given, backend="null")
    assert "expected a string, or messages" in str(caught.value)
