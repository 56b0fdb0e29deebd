"""Which role of a run is evaluated on held-out prompts, and with what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlflow.binding.backends import device_of
from rlflow.binding.models import Loaded, make_models
from rlflow.binding.rewards import Rewards
from rlflow.binding.roles import BoundRole, Halves, Roles
from rlflow.config.options import Options
from rlflow.data.dataset import Dataset
from rlflow.execution.engine import JUDGE, Engine, Scorer
from rlflow.execution.executor import Executor
from rlflow.execution.lanes import Lanes
from rlflow.graph.model import Graph, Op
from rlflow.plan import Plan
from rlflow.runs.evaluate import Evaluation, FlowEvaluation
from rlflow.runs.planning import evaluation_role, evaluation_roles, policies
from rlflow.trace.compile import all_nodes
from rlflow.trace.evaluation import RESPONSES
from rlflow.training.protocols import Sampling


def evaluated_role(graph: Graph, roles: Roles, held_out: Dataset, rewards: Rewards, options: Options) -> str | None:
    """The first role that is evaluated, where there are held-out prompts and something can judge them."""
    name = evaluation_role(graph, roles, options)
    return name if name and len(held_out) and rewards.judge() is not None else None


def evaluations(
    graph: Graph, roles: Roles, first: str, engine: Engine, lanes: Lanes, held_out: Dataset, scorer: Scorer, options: Options
) -> Evaluation:
    """Measure the accuracy of the role ``first``, and of each other role that samples from the prompts of the data. Figures name the role
    where the flow trains several."""
    names = [first, *(name for name in evaluation_roles(graph, roles, options) if name != first)]
    own, *others = (evaluation(graph, roles[name], engine, lanes, held_out, scorer, options) for name in names)
    return replace(own, others=tuple(others), named=len(policies(roles)) > 1)


def flow_evaluation(executor: Executor, plan: Plan, held_out: Dataset) -> FlowEvaluation | None:
    """The flow's own evaluation; None where it has none, or no prompts are held out."""
    if plan.evaluation is None or not len(held_out):
        return None
    prompts = held_out.batch(range(len(held_out)))
    if prompts.axis.grouped:  # pairs: a prompt stands in two rows
        prompts = prompts.rows(prompts.axis.heads)
    return FlowEvaluation(executor, plan.evaluation, prompts.select(*(name for name in prompts.columns if name not in RESPONSES)))


def evaluation(
    graph: Graph, role: BoundRole, engine: Engine, lanes: Lanes, held_out: Dataset, scorer: Scorer, options: Options
) -> Evaluation:
    """Measure the accuracy of a role's answers to held-out prompts. ``scorer`` says which of them are right."""
    model = engine.models[role.name]
    if model.generator is None:
        model.generator = _generator_for_evaluation(role, options, engine.keeper.loaded)
    prompts = held_out.batch(range(len(held_out)))
    node = next((n for n in all_nodes(graph.nodes) if n.op is Op.GENERATE and n.role == role.name), None)
    settings = dict(node.settings) if node else {}
    longest = int(prompts.data["tokens"].lengths.max()) if "tokens" in prompts else 0  # type: ignore[union-attr]
    sampled: dict[str, Any] = {name: settings[name] for name in ("top_p", "top_k", "stop", "min_tokens") if name in settings}
    sampling = Sampling(1, int(str(settings.get("max_tokens", longest + 1))), **sampled)
    questions = prompts.select(*(name for name in prompts.columns if name not in RESPONSES))
    engine.scorers = {**engine.scorers, JUDGE: scorer}
    return Evaluation(lanes, engine, role.name, questions, sampling)


def _generator_for_evaluation(role: BoundRole, options: Options, loaded: Loaded) -> Any:
    """A generator for a flow that never samples."""
    return make_models([role], options, device_of(options.device), {}, lambda role: Halves(False, True), loaded)[role.name].generator


