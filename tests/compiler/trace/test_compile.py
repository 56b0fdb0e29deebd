"""Tracing: the graph of a flow's lines, and the mistakes found in it."""

import re
from dataclasses import dataclass

import pytest

from rlflow import (
    RANK0,
    FlowError,
    flow,
    group_mean,
    loss,
    repeat,
    row,
    scalar,
    stage,
    text,
    truncated_weights,
)
from rlflow.author.load import load_flow
from rlflow.author.node_options import AskOptions, RepeatOptions, ShownOptions, UpdateOptions
from rlflow.compiler.graph.model import Column, Op
from rlflow.compiler.trace.arguments import role_names
from rlflow.compiler.trace.compile import TraceOptions, compile_flow, trace
from rlflow.rewards.environments.environment_spec import parse_environment


@loss
def policy_loss(new, logprobs):
    return logprobs - new.logprobs, {}


@loss(new="values")
def value_loss(new, values):
    return (new.values - values).square(), {}


@stage(gives="keep", rows="group")
def mixed(scores, group):
    return scores > group


@stage(gives={"bar": scalar("float32")}, dispatch=RANK0)
def raise_bar(scores, bar):
    return bar + scores.mean()


def traced(function, **options):
    return compile_flow(flow(**options)(function)).graph


def problems(function, hp=None, **options):
    return [(p.code, p.found) for p in trace(flow(**options)(function), hp).problems if p.severity == "error"]


def test_edges_are_columns_and_not_lines():
    def f(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    graph = traced(f)
    assert [node.name for node in graph.nodes] == [
        "prompts",
        "actor.generate",
        "reward",
        "actor.logprobs",
        "actor.update",
    ]
    assert graph.before("reward") == {"prompts", "actor.generate"}
    assert graph.before("actor.update") == {"prompts", "actor.generate", "actor.logprobs"}


def divided(by):
    return 1 / by


def test_a_python_exception_is_a_problem_at_the_last_user_line():
    def f(prompts, actor):
        actor.generate(prompts, max_tokens=4)
        divided(by=0)

    [problem] = trace(flow(f)).problems
    assert (problem.code, problem.place.path) == ("flow-raised", __file__)
    assert problem.place.line == divided.__code__.co_firstlineno + 1
    assert "ZeroDivisionError" in problem.message

    def g(prompts, actor):
        actor.generate(prompts, max_tokens=4)
        re.compile("(")  # raised in a file of Python's

    [problem] = trace(flow(g)).problems
    assert (problem.place.path, problem.place.line) == (__file__, g.__code__.co_firstlineno + 2)


@dataclass(frozen=True)
class Settings:
    focus: float = 0.5
    clip: float = 0.2


def test_a_misspelled_setting_gets_the_nearest_field():
    def f(prompts, actor, hp=Settings()):
        actor.generate(prompts, max_tokens=hp.focuss)

    [problem] = trace(flow(f), Settings()).problems
    assert (problem.code, problem.place.line) == ("flow-raised", f.__code__.co_firstlineno + 1)
    assert (problem.found, problem.nearest, problem.remedy) == ("focuss", "focus", "read 'focus'")
    assert problem.expected == "a field of Settings: focus, clip"


def test_a_second_call_has_a_new_name():
    def f(prompts, actor):
        batch = actor.generate(prompts, max_tokens=4)
        batch |= actor.logprobs(batch)
        batch |= actor.logprobs(batch, gives="ref_logprobs")
        actor.update(batch, policy_loss)
        actor.update(batch, policy_loss)

    names = [node.name for node in traced(f).nodes[2:]]
    assert names == ["actor.logprobs", "actor.logprobs#2", "actor.update", "actor.update#2"]


def test_generated_rows_have_the_columns_of_their_prompts():
    seen = {}

    def f(prompts, actor):
        batch = actor.generate(prompts, max_tokens=4)
        seen.update(batch.columns)
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    traced(f, data={"tests": text})
    assert {"prompt", "answer", "tests", "tokens", "group"} <= set(seen)


def test_a_helper_function_is_inlined():
    def scored(batch, reward):
        return batch | reward(batch)

    def f(prompts, actor, reward):
        batch = scored(actor.generate(prompts, max_tokens=4), reward)
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    assert "reward" in traced(f).by_name


def test_a_flow_called_by_a_flow_is_inlined():
    @flow
    def inner(prompts, actor):
        batch = actor.generate(prompts, max_tokens=4)
        return batch | actor.logprobs(batch)

    def f(prompts, actor):
        actor.update(inner(prompts, actor), policy_loss)

    assert [node.op for node in traced(f).nodes] == [Op.DATA, Op.GENERATE, Op.LOGPROBS, Op.UPDATE]


@stage(gives={"rank": row("float32")})
def ranked(prompt_tokens, group):
    return group.float()


@stage(gives={"rank": row("float32")}, rows="group")
def ranked_whole(prompt_tokens):
    return prompt_tokens[:, 0].float()


@stage(gives="keep", dispatch=RANK0)
def kept(prompt_tokens):
    return prompt_tokens[:, 0] > 0


@pytest.mark.parametrize("made", [ranked, ranked_whole, kept], ids=lambda made: made.name)
def test_group_columns_without_groups_are_refused(made):
    def f(prompts, actor):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)
        made(prompts.drop("answer"))

    assert "no-groups" in [code for code, _ in problems(f)]


def test_a_second_name_requests_the_entropy():
    def f(prompts, actor):
        batch = actor.generate(prompts, max_tokens=4)
        batch |= actor.logprobs(batch, gives=("logprobs", "entropy"))
        actor.update(batch, policy_loss)

    assert [(o.name, o.source) for o in traced(f).by_name["actor.logprobs"].outputs] == [
        ("logprobs", "logprobs"),
        ("entropy", "entropy"),
    ]


def test_the_kind_of_a_role_follows_from_its_use():
    uses = {use.name: use for use in compile_flow(load_flow("ppo")).graph.roles}
    assert {n for n, use in uses.items() if use.trained} == {"actor", "critic"}
    assert {n for n, use in uses.items() if use.generates} == {"actor"}
    assert {n for n, use in uses.items() if use.rewards} == {"reward"}
    assert (uses["actor"].head, uses["critic"].head, uses["reference"].head) == (
        "logprobs",
        "values",
        "logprobs",
    )


def test_variadic_roles_bind_every_reward_in_order():
    @flow
    def f(prompts, actor, *rewards, hp=None):
        batch = actor.generate(prompts, max_tokens=4)
        for number, reward in enumerate(rewards):
            batch |= reward(batch, gives="scores" if number == 0 else f"scores_{number}")
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    assert role_names(f, 3) == {"actor": ["actor"], "rewards": ["rewards_0", "rewards_1", "rewards_2"]}
    graph = compile_flow(f, options=TraceOptions(rewards=3)).graph
    assert [node.name for node in graph.nodes if node.op is Op.REWARD] == [
        "rewards_0",
        "rewards_1",
        "rewards_2",
    ]


def test_a_reward_reads_the_parameters_of_its_function():
    @flow(data={"tests": text})
    def f(prompts, actor, reward):
        batch = actor.generate(prompts, max_tokens=4)
        batch |= reward(batch)
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    graph = compile_flow(f, options=TraceOptions(1, ("completion", "tests"))).graph
    assert {"completion", "tests"} <= {item.parameter for item in graph.by_name["reward"].inputs}
    found = trace(f, options=TraceOptions(1, ("completion", "difficulty"))).problems
    assert [p.expected for p in found if p.code == "missing-column"] == ["column 'difficulty'"]


def test_pairs_are_groups_of_two_without_sampling():
    @loss(rows="group")
    def pair_loss(new, ref_logprobs):
        return new.logprobs - ref_logprobs, {}

    def f(prompts, actor, reference):
        batch = prompts | reference.logprobs(prompts, gives="ref_logprobs")
        actor.update(batch, pair_loss, mean=1.0)

    graph = traced(f, data={"chosen": text, "rejected": text})
    assert {"tokens", "mask", "group", "chosen"} <= {output.name for output in graph.nodes[0].outputs}
    assert graph.axes[0].grouped


# -- merging
# ------------------------------------------------------------------------------------------------------------


def test_a_baseline_per_prompt_is_merged_into_rows_of_its_prompts():
    @stage(gives="advantages")
    def over_greedy(scores, baseline, mask):
        return (scores - baseline)[:, None] * mask

    @loss
    def advantage_loss(new, advantages):
        return -new.logprobs * advantages, {}

    def f(prompts, actor, reward):
        batch = actor.generate(prompts, samples=4, max_tokens=4)
        greedy = actor.generate(prompts, max_tokens=4, temperature=0)
        batch |= reward(batch)
        batch |= reward(greedy, gives="baseline")
        batch |= over_greedy(batch)
        actor.update(batch, advantage_loss)

    assert traced(f).by_name["over_greedy"].inputs[1].column == Column(4, "baseline")


def test_a_dropped_column_is_missing():
    def f(prompts, actor):
        batch = actor.generate(prompts, max_tokens=4)
        batch |= actor.logprobs(batch)
        actor.update(batch.drop("logprobs"), policy_loss)
        actor.update(batch.select("prompt_tokens", "tokens", "mask"), policy_loss)

    assert [code for code, _ in problems(f)] == ["missing-column"]


def test_dropping_an_absent_column_is_refused():
    def f(prompts, actor):
        batch = actor.generate(prompts, max_tokens=4).drop("scores").rename(values="old")
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    assert [code for code, _ in problems(f)] == ["missing-column", "missing-column"]


def test_a_renamed_column_has_the_table_kind_of_its_new_name():
    def f(prompts, actor):
        batch = actor.generate(prompts, max_tokens=4).rename(tokens="scores")
        batch |= actor.logprobs(batch.rename(scores="tokens"))
        actor.update(batch, policy_loss)

    assert next(code for code, _ in problems(f)) == "table-kind"


def test_a_later_read_of_an_earlier_batch_counts():
    def f(prompts, actor, reward):
        first = actor.generate(prompts, max_tokens=4)
        first |= actor.logprobs(first)
        batch = first | truncated_weights(first, cap=1.0, gives="logprobs")
        actor.update(batch, policy_loss)
        actor.update(first, policy_loss)

    assert problems(f) == []


def test_an_update_needs_the_mask():
    def f(prompts, actor):
        batch = actor.generate(prompts, max_tokens=4)
        batch |= actor.logprobs(batch)
        actor.update(batch.drop("mask"), policy_loss)

    found = trace(flow(f)).problems
    assert [(p.code, p.expected) for p in found] == [("missing-column", "column 'mask'")]


# -- state
# ------------------------------------------------------------------------------------------------------------


def test_state_is_a_column_of_every_batch_and_a_stage_sets_it():
    def f(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        raise_bar(batch)
        batch |= raise_bar(batch)
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    graph = traced(f, state=lambda hp: {"bar": 0.5})
    first, second = graph.by_name["raise_bar"], graph.by_name["raise_bar#2"]
    assert graph.nodes[first.inputs[1].column.node].op is Op.STATE
    assert second.inputs[1].column == Column(first.id, "bar")
    assert [(slot.name, slot.initial, slot.final) for slot in graph.state] == [
        ("bar", 0.5, Column(second.id, "bar"))
    ]


def test_a_stage_that_names_state_has_the_kind_of_the_state():
    @stage(gives="bar", dispatch=RANK0)
    def fixed(scores):
        return scores.mean()

    def f(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        fixed(batch | reward(batch))
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    result = trace(flow(state=lambda hp: {"bar": 0.5})(f))
    assert result.problems == ()
    assert str(result.program.graph.by_name["fixed"].outputs[0].kind) == "scalar float32"


def test_a_body_reads_the_state_at_the_call_of_repeat():
    @stage(gives="keep", rows="group")
    def above(scores, group, bar):
        return scores > bar

    def f(prompts, actor, reward):
        def body(fresh):
            rows = actor.generate(fresh, samples=2, max_tokens=4)
            rows |= reward(rows)
            return rows | above(rows)

        first = actor.generate(prompts, samples=2, max_tokens=4)
        first |= reward(first)
        raise_bar(first)
        batch = repeat(body, prompts, groups=2, tries=2)
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    graph = traced(f, state=lambda hp: {"bar": 0.5})
    passed = {item.parameter: item.column for item in graph.by_name["repeat.body"].inputs}
    assert passed["bar"] == Column(graph.by_name["raise_bar"].id, "bar")


@pytest.mark.parametrize("name", ["scores", "tokens"])
def test_state_with_a_name_of_the_table_is_refused(name):
    def f(prompts, actor):
        batch = actor.generate(prompts, max_tokens=4)
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    assert ("table-kind", f"{name}: scalar float32") in problems(f, state=lambda hp: {name: 0.5})


def test_state_is_set_once_for_all_ranks():
    from rlflow import ALL

    everywhere = stage(gives={"bar": scalar("float32")}, dispatch=ALL)(lambda scores: scores.mean())

    def f(prompts, actor, reward):
        batch = actor.generate(prompts, max_tokens=4)
        everywhere(batch | reward(batch))
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    assert problems(f, state=lambda hp: {"bar": 0.5}) == [("state-dispatch", "bar under ALL")]


# -- repeat
# ------------------------------------------------------------------------------------------------------------


def test_a_repeat_body_is_its_own_graph_with_unique_names():
    def f(prompts, actor, reward):
        def body(fresh):
            rows = actor.generate(fresh, samples=2, max_tokens=4)
            rows |= reward(rows)
            return rows | mixed(rows)

        batch = repeat(body, prompts, groups=2, tries=3)
        batch |= actor.logprobs(batch)
        batch |= reward(batch)
        actor.update(batch, policy_loss)

    found = trace(flow(f))
    assert [p.code for p in found.problems] == []
    graph = found.program.graph
    node = graph.by_name["repeat.body"]
    assert [inner.name for inner in node.body.nodes] == ["prompts", "actor.generate", "reward", "mixed"]
    assert "reward#2" in graph.by_name
    assert node.settings == RepeatOptions(groups=2, tries=3)
    assert graph.before("actor.update") >= {"repeat.body"}
    assert node.reads == {"actor", "reward"}


def test_rows_kept_by_repeat_have_their_own_axis():
    def f(prompts, actor, reward):
        def body(fresh):
            rows = actor.generate(fresh, samples=2, max_tokens=4)
            return rows | mixed(rows | reward(rows))

        batch = repeat(body, prompts, groups=2, tries=3)
        batch |= reward(
            prompts | actor.generate(prompts, max_tokens=4).select("completion"), gives="baseline"
        )
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    assert "row-axes" in [code for code, _ in problems(f)]


def test_mistakes_within_and_after_a_body_are_found():
    @stage(gives={"hard": row("float32")})
    def hard(scores):
        return scores

    def f(prompts, actor, reward):
        def body(fresh):
            rows = actor.generate(fresh, samples=2, max_tokens=4)
            rows |= reward(rows)
            hard(rows)
            return rows | mixed(rows.drop("scores"))

        batch = repeat(body, prompts, groups=0, tries=2)
        actor.update(batch, policy_loss)

    found = [(p.code, p.expected) for p in trace(flow(f)).problems]
    assert ("never-read", "a later stage, loss or method that reads it") in found
    assert ("setting-range", "groups: an integer of at least 1") in found
    assert [expected for code, expected in found if code == "missing-column"] == [
        "column 'scores'",
        "column 'logprobs'",
    ]


# -- symbols
# ------------------------------------------------------------------------------------------------------------

USES = {
    "bool": bool,
    "len": len,
    "iter": list,
    "int": lambda b: int(b["tokens"]),
    "range": lambda b: range(b["tokens"]),
    "neg": lambda b: -b["tokens"],
    "radd": lambda b: 1 + b["tokens"],
    "rsub": lambda b: 1 - b,
    "and": lambda b: b & b,
    "or": lambda b: b | 3,
    "ror": lambda b: {} | b,
    "eq": lambda b: b == b,
    "ne": lambda b: b["mask"] != 1,
    "lt": lambda b: b["tokens"] < 3,
    "sum": lambda b: sum(b["tokens"]),
    "max": lambda b: max(b, b["tokens"]),
    "abs": abs,
    "round": lambda b: round(b["tokens"]),
    "index": lambda b: b[0],
    "slice": lambda b: b[:2],
    "attribute": lambda b: b["tokens"].shape,
    "set": lambda b: b.__setitem__("x", 1),
    "rows": lambda b: b.rows([0]),
    "chunk": lambda b: b.chunk(2),
}


@pytest.mark.parametrize("use", USES)
def test_a_symbol_is_refused_as_a_value(use):
    def f(prompts, actor):
        USES[use](actor.generate(prompts, max_tokens=4))

    found = trace(flow(f)).problems
    assert [p.code for p in found] == ["symbol-as-value"]
    assert found[0].place.path == __file__
    assert re.match(r"a batch has no rows while the flow is traced, so it cannot be used ", found[0].message)


def test_a_symbol_answers_questions_about_its_shape():
    answers = {}

    def f(prompts, actor):
        batch = actor.generate(prompts, max_tokens=4)
        answers.update(
            contains="tokens" in batch,
            absent="values" in batch,
            text=str(batch.select("mask")),
            column=str(batch["mask"]),
        )
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    traced(f)
    assert answers == {
        "contains": True,
        "absent": False,
        "text": "Batch(traced; mask: token bool)",
        "column": "<column mask, not known while tracing>",
    }


def test_stages_refuse_a_batch_of_a_finished_trace():
    kept = []

    def f(prompts, actor, reward):
        kept.append(actor.generate(prompts, samples=2, max_tokens=4))
        batch = kept[0] | actor.logprobs(kept[0])
        actor.update(batch, policy_loss)

    traced(f)
    with pytest.raises(FlowError) as caught:
        mixed(kept[0])
    assert caught.value.problems[0].code == "leaked-symbol"
    with pytest.raises(FlowError, match="another trace"):
        kept[0].select("tokens")


# -- settings
# ------------------------------------------------------------------------------------------------------------


def test_settings_shape_the_graph():
    @dataclass(frozen=True)
    class Settings:
        samples: int = 2
        centred: bool = True

    @stage(gives="advantages", rows="group")
    def centre(scores, group, mask):
        return (scores - group_mean(scores, group))[:, None] * mask

    @stage(gives="advantages")
    def spread(scores, mask):
        return scores[:, None] * mask

    @loss
    def advantage_loss(new, advantages):
        return -new.logprobs * advantages, {}

    @flow
    def f(prompts, actor, reward, hp=Settings()):
        batch = actor.generate(prompts, samples=hp.samples, max_tokens=4)
        batch |= reward(batch)
        batch |= centre(batch) if hp.centred else spread(batch)
        actor.update(batch, advantage_loss)

    assert "centre" in compile_flow(f).graph.by_name
    assert "spread" in compile_flow(f, Settings(centred=False)).graph.by_name
    assert compile_flow(f, Settings(samples=5)).graph.by_name["actor.generate"].settings.samples == 5
    assert compile_flow(f, Settings(samples=5)).graph.hp == (("samples", 5), ("centred", True))


def test_settings_of_other_types_are_kept_unchanged():
    marker = object()

    @stage(gives="values")
    def shaped(logprobs, *, how, shift=0.0):
        return logprobs

    @flow
    def f(prompts, actor, critic):
        batch = actor.generate(prompts, max_tokens=4)
        batch |= actor.logprobs(batch)
        batch |= shaped(batch, how=marker)
        critic.update(batch, value_loss)

    program = compile_flow(f)
    assert program.settings["shaped"] == {"shift": 0.0, "how": marker}
    assert program.graph.by_name["shaped"].settings == ShownOptions((("shift", 0.0), ("how", repr(marker))))


def test_an_update_keeps_its_own_setting_if_the_loss_has_the_same_name():
    @loss
    def capped(new, *, mean="rows", after=7, cap=1.0):
        return -new.logprobs * cap

    @flow
    def f(prompts, actor):
        actor.update(actor.generate(prompts, max_tokens=4), capped, mean=3, cap=2.0)

    program = compile_flow(f)
    assert program.graph.nodes[-1].settings == UpdateOptions(mean=3, own=(("cap", 2.0),))
    assert program.settings["actor.update"] == {"cap": 2.0}


def test_data_of_a_wrong_kind_are_one_mistake():
    @stage(gives={"bonus": row("float32")})
    def of_answers(answer: list[str], scores):
        return scores

    def f(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=8)
        batch |= reward(batch)
        batch |= of_answers(batch)
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    assert [code for code, _ in problems(f, data={"answer": row("float32")})] == ["table-kind"]


def test_a_role_with_values_cannot_train_on_log_probs():
    @loss
    def likelihood(new):
        return -new.logprobs, {}

    @flow
    def torn(prompts, actor, critic):
        batch = actor.generate(prompts, max_tokens=3)
        critic.update(batch | critic.values(batch), likelihood)

    with pytest.raises(FlowError, match="role 'critic' is used with 2 heads"):
        compile_flow(torn)


def test_custom_follow_up_prompts_are_encoded_for_their_sampler():
    graph = compile_flow(load_flow("critique")).graph
    assert [node.settings for node in graph.nodes if node.op is Op.ASK] == [AskOptions(("verifier",))]


def test_an_environment_generate_waits_for_the_inputs_of_its_turns():
    environment = parse_environment("retry", {"turns": 3})
    alone, beside = (
        compile_flow(load_flow("grpo"), options=TraceOptions(environments=some))
        .graph.by_name["actor.generate"]
        .timeout
        for some in ({}, {"": environment})
    )
    assert beside - alone == environment.bounds.turns * environment.bounds.seconds > 0
