"""Roles bound to backends. One call reads the capabilities of each backend once."""

import shutil
from dataclasses import replace

import pytest
from sources import TASKS

from rlflow.author.load import load_flow
from rlflow.backends import local, null
from rlflow.compiler.graph.model import RoleUse
from rlflow.compiler.trace.compile import TraceOptions, compile_flow
from rlflow.config.flags import sort_values
from rlflow.config.footprint import facts
from rlflow.config.roles.bound import BoundSide, Sides, bind_roles, capabilities, folders, model_uses, usual
from rlflow.config.roles.loaded_models import ends
from rlflow.errors import PlanError
from rlflow.training.protocols import Capabilities, GivesChunks, ScoresTokens

MODEL = TASKS / "arithmetic_model"


def of(flow, **values):
    graph = compile_flow(load_flow(flow)).graph
    return bind_roles(graph, sort_values({"model": str(MODEL), **values}, [use.name for use in graph.roles]))


def test_each_model_role_is_bound_with_its_requirements():
    found = of("ppo")
    assert {name: role.needs for name, role in found.items()} == {
        "actor": Sides(True, True),
        "critic": Sides(True, False),
        "reference": Sides(True, False),
    }
    assert {role.folder for role in found.values()} == {MODEL}
    assert list(folders(found.values())) == [MODEL]
    assert [half.backend for half in found["actor"].sides] == ["local", "local"]


def test_a_role_has_the_template_variables_that_end_its_rows(tmp_path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    template = (
        "{% for m in messages %}{{ m.content }}{{ '<pad>' if padded and m.role == 'assistant' "
        "else '<eos>' }}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    for padded, wanted in ((True, (0, 1)), (False, (1,))):
        role = of("grpo", model=str(folder), **{"data.template_kwargs": {"padded": padded}})["actor"]
        assert ends(role) == wanted


def test_an_untrained_reward_is_no_model():
    graph = compile_flow(load_flow("grpo")).graph
    assert RoleUse("reward", head="scores", rewards=True) in graph.roles
    assert [use.name for use in model_uses(graph)] == ["actor"]  # no stage reads the reference if beta is 0


def test_backends_declare_their_capabilities():
    found = of("grpo", **{"actor.trainer": "fsdp", "actor.generator": "vllm", "actor.tensor_parallel": 2})[
        "actor"
    ]
    assert (found.trainer.can.collective, found.trainer.can.tensor, found.generator.can.tensor) == (
        True,
        2,
        2,
    )
    assert found.generator.offers(ScoresTokens)
    assert found.generator.offers(GivesChunks)
    assert found.generator.can.cache_bytes > 0
    assert "weights" in of("grpo")["actor"].trainer.can.movable
    assert of("grpo")["actor"].trainer.can.passing == ("gradient",)
    assert of("grpo", **{"actor.trainer": "deepspeed"})["actor"].trainer.can.copied


class Cold(local.Generator):
    """A generator with vLLM's limits of the temperature."""

    @classmethod
    def capabilities(cls, settings, device):
        return replace(super().capabilities(settings, device), temperatures=(0.01, 2.0))


@pytest.mark.parametrize(
    ("temperature", "found"), [("3", "3"), ("0.001", "0.001"), ("2", None), ("0.01", None), ("0", None)]
)
def test_an_unsupported_temperature_is_refused_before_loading(temperature, found, monkeypatch):
    config = sort_values(
        {"model": str(MODEL), "actor.generate.temperature": temperature}, ["actor", "reference", "reward"]
    )
    graph = compile_flow(load_flow("grpo"), None, TraceOptions(sampling=config.sampling)).graph
    bind_roles(graph, config)
    monkeypatch.setattr(local, "Generator", Cold)
    if found is None:
        assert bind_roles(graph, config)
        return
    with pytest.raises(
        PlanError, match="--actor.generate.temperature 1, or another --actor.generator"
    ) as refused:
        bind_roles(graph, config)
    assert [(problem.code, problem.found) for problem in refused.value.problems] == [
        ("temperature", f"temperature {found}")
    ]


def test_vllm_declares_its_refused_temperatures():
    generator = pytest.importorskip("rlflow.backends.vllm").Generator
    assert capabilities(generator, generator.Settings(), "cpu").temperatures == (0.01, 2.0)
    assert Capabilities.temperatures == (0.0, float("inf"))


def test_an_undeclared_capability_is_absent():
    class Plain:
        pass

    assert capabilities(Plain, object(), "cpu") == capabilities(None, None, "cpu") == Capabilities()


def test_a_class_without_capabilities_is_named_with_a_remedy():
    class Forgets:
        @classmethod
        def capabilities(cls, settings, device):
            """Return nothing."""

    class NotOfTheClass:
        def capabilities(self, settings, device):
            return Capabilities()

    with pytest.raises(PlanError, match=r"Forgets does not declare its capabilities(?s:.*)returned None"):
        capabilities(Forgets, object(), "cpu")
    with pytest.raises(
        PlanError,
        match=r"NotOfTheClass does not declare(?s:.*)returned TypeError(?s:.*)remedy: +return .* from a class method",
    ):
        capabilities(NotOfTheClass, object(), "cpu")


@pytest.mark.parametrize("kind", [local.Trainer, local.Generator, null.Trainer, null.Generator])
def test_a_subclass_must_declare_thread_ranks_and_shared_weights(kind):
    can, inherited = (capabilities(each, kind.Settings(), "cpu") for each in (kind, type("Sub", (kind,), {})))
    assert can.threads
    assert inherited == replace(can, threads=False, shares=False)


def test_none_opts_out_of_an_inherited_capability():
    whole = type("Whole", (null.Generator,), {"generate_chunks": None})
    assert [
        BoundSide("generator", "null", kind, None, Capabilities()).offers(GivesChunks)
        for kind in (null.Generator, whole, None)
    ] == [True, False, False]


def test_null_forwards_do_not_depend_on_other_rows():
    assert (usual("null", "trainer").row_exact, usual("local", "trainer").row_exact) == (True, False)
    assert usual("fsdp", "generator") == Capabilities()


def test_all_problems_are_reported_at_once():
    with pytest.raises(PlanError) as refused:
        of("ppo", **{"actor.lrr": 1, "critic.lrs": 2})
    messages = [problem.message for problem in refused.value.problems]
    assert messages == ["role 'actor' has no setting 'lrr'", "role 'critic' has no setting 'lrs'"]


def test_file_headers_are_read_again_only_after_a_change(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert facts(tmp_path) is facts(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 128}')
    assert facts(tmp_path).hidden == 128


def test_an_adapter_folder_is_refused_as_a_model_before_loading(tmp_path):
    for file in MODEL.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(PlanError, match="contains an adapter"):
        of("grpo", model=str(tmp_path))
