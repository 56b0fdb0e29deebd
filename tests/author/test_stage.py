"""Decorators: the parts of a stage, a loss and a flow, and errors at their definition."""

import pytest
import torch

from rlflow import DP_COMPUTE, RANK0, Batch, FlowError, flow, group, loss, row, stage, text, token
from rlflow.author.columns import Kind, Level
from rlflow.author.flow import Parameters
from rlflow.author.signature import REQUIRED, ColumnParameter, read


@stage(gives=("advantages", "returns"), dispatch=RANK0, timeout=5)
def gae(rewards, values: token(torch.float32), extra: row("int64") = None, *, gamma, lam=0.95):
    """What it is."""
    return rewards - values, rewards


def test_positional_parameters_name_columns_and_keywords_are_settings():
    assert gae.signature.columns == (
        ColumnParameter("rewards", Kind(Level.TOKEN, "float32"), False),
        ColumnParameter("values", Kind(Level.TOKEN, "float32"), False),
        ColumnParameter("extra", Kind(Level.ROW, "int64"), True),
    )
    assert gae.signature.settings == {"gamma": REQUIRED, "lam": 0.95}


def test_a_stage_keeps_the_name_and_docstring_of_its_function():
    assert (gae.__name__, gae.__doc__, gae.name) == ("gae", "What it is.", "gae")


def test_given_columns_have_the_table_kind_unless_declared():
    assert gae.gives == {"advantages": Kind(Level.TOKEN, "float32"), "returns": Kind(Level.TOKEN, "float32")}
    assert stage(gives={"hard": row(torch.float32)})(abs).gives == {"hard": Kind(Level.ROW, "float32")}
    assert stage(gives="own")(abs).gives == {"own": None}
    assert stage(abs).dispatch == DP_COMPUTE


def test_a_stage_called_with_tensors_runs_its_function():
    one = torch.ones(2)
    assert torch.equal(gae(one, one, gamma=1.0)[0], torch.zeros(2))


def test_a_stage_called_with_a_batch_outside_a_flow_runs_at_once():
    batch = Batch.of(rewards=[[1.0, 2.0], [3.0]], values=[[1.0, 1.0], [1.0]])
    found = gae(batch, gamma=1.0, gives=("advantages", "values"))
    assert found.columns == {"advantages": token("float32"), "values": token("float32")}
    assert found["advantages"].tolist() == [[0.0, 1.0], [2.0, 0.0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dispatch": "RANK0"}, "expected DP_COMPUTE, ALL or RANK0"),
        ({"rows": "groups"}, "expected 'row' or 'group'"),
        ({"timeout": 0}, "expected seconds above 0"),
        ({"gives": {"x": "row"}}, "expected a kind"),
        ({"give": "x"}, "unexpected keyword argument 'give'"),
    ],
)
def test_unsuitable_options_are_refused_at_the_definition_of_a_stage(options, message):
    with pytest.raises(TypeError, match=message):
        stage(**options)(abs)


def test_a_loss_states_the_outputs_of_the_model():
    assert loss(new=("logprobs", "entropy"))(abs).head == "logprobs"
    assert loss(new="values")(abs).head == "values"
    with pytest.raises(TypeError, match="found 'logits'"):
        loss(new="logits")
    with pytest.raises(TypeError, match="expected 'row' or 'group'"):
        loss(rows="pair")(abs)


def test_a_loss_without_metrics_has_none():
    @loss
    def bare(new, weights, *, clip):
        return new * weights

    assert bare(2, 3, clip=1) == (6, {})
    assert bare.signature.column_names == ("weights",)


def test_a_function_with_many_columns_must_name_each():
    def f(*columns):
        return columns

    with pytest.raises(TypeError, match=r"'\*columns' does not name a column"):
        read(f)


def test_type_checker_hints_are_ignored():
    namespace = {}
    exec("def f(scores: 'NotImported', own: 'AlsoNot'): pass", namespace)
    assert [(c.name, c.kind) for c in read(namespace["f"]).columns] == [
        ("scores", row("float32")),
        ("own", None),
    ]


def test_parameters_of_a_flow_are_data_roles_and_settings():
    @flow(data={"tests": text})
    def f(prompts, actor, *rewards, reference, hp=None):
        pass

    assert f.parameters == Parameters("prompts", ("actor", "reference"), "rewards", None)
    assert f.data == {"tests": text}
    with pytest.raises(TypeError, match="expected a kind"):
        flow(data={"tests": "text"})(abs)


@pytest.mark.parametrize("hp", [dict, {"clip": 0.2}, 3])
def test_settings_are_an_object_of_a_dataclass(hp):
    def f(prompts, actor, hp=hp):
        pass

    with pytest.raises(FlowError, match="the settings of flow '.*' are not a dataclass"):
        _ = flow(f).parameters


def test_kinds_take_dtypes_of_torch_and_of_python():
    assert row(torch.float32) == row("float32") == row(float)
    assert (str(group(bool)), str(token(int)), str(text)) == ("group bool", "token int64", "text")
    with pytest.raises(TypeError, match="found an unknown dtype"):
        row("flaot")
    with pytest.raises(TypeError, match="text has no dtype"):
        text(str)


def test_a_flow_called_without_roles_names_its_needs():
    @flow
    def f(prompts, actor, reward):
        pass

    with pytest.raises(FlowError) as caught:
        f(Batch.of(prompt=["a"]))
    assert caught.value.problems[0].expected == "actor, reward"


def test_a_stage_on_a_role_needs_a_flow():
    @stage(gives="values", on="critic")
    def ask(critic, tokens):
        return tokens

    with pytest.raises(FlowError, match="runs on the role 'critic'"):
        ask(Batch.of(tokens=[[1, 2]]))
