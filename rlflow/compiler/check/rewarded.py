"""Check that updates learn from rewards.

Each reward that a flow calls must change the gradient of an update. The author must declare it if a flow or
loss trains without rewards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlflow.author.columns import Level
from rlflow.author.joint import LossTerm
from rlflow.author.loss import Loss
from rlflow.compiler.check.reached import PathStep, Reach, ReachedUpdate
from rlflow.compiler.graph.model import SETTING, Graph, Node, Op, all_nodes
from rlflow.compiler.trace.compile import Program
from rlflow.errors import Place, Problem, listed

# columns that a scoring stage written by the author reads
SIGNALS = ("completion", "answer", "finish", "prompt", "chosen", "turn_rewards", "episode_score")


def reward_problems(program: Program) -> Iterator[Problem]:
    """Yield a problem for each reward that no update learns from, or for a flow without rewards.

    It's an error if a reward's scores don't reach an update, but only a note if the author declared that they
    needn't, or if the flow has no reward. The flow's losses must already be free of errors.
    """
    graph = program.graph
    updates = [node for node in graph.nodes if node.op is Op.UPDATE]
    rewards = [node for node in all_nodes(graph.nodes) if node.op is Op.REWARD]
    if not updates:
        return
    if not rewards:
        yield from _no_signal(program, updates)
        return
    tried = {node.name: _influences(program, node) for node in updates}
    yield from _zero(program, updates)
    reaches = [Reach(graph, node, tried) for node in rewards]
    players = {use.name for use in graph.roles if use.generates and use.trained}
    learning = [node for node in updates if node.role in players] or updates
    for node, reach in zip(rewards, reaches, strict=True):
        if not any(update.name in reach.reached for update in learning):
            yield _unreached(program, node, reach, learning)
    reached = {graph.by_name[name].role for reach in reaches for name in reach.reached}
    for role in sorted(players - reached) if reached & players else ():
        update = next(node for node in updates if node.role == role)
        yield from _unrewarded(program, update, rewards)


def _terms(program: Program, node: Node) -> list[LossTerm]:
    from rlflow.compiler.check.losses import loss_terms

    return loss_terms(program, node, program.loss(node.name))


def _influences(program: Program, node: Node) -> frozenset[str]:
    """Return the parameters of an update whose columns change its gradient.

    A column can do so through one of the losses, or by selecting rows.
    """
    from rlflow.compiler.check.influence import influential
    from rlflow.compiler.check.losses import column_kinds

    names = frozenset(item.parameter for item in node.inputs)
    own = {name for name in names if name.startswith(SETTING) or name in ("mask", "group")}
    influences = set(own)
    for term in _terms(program, node):
        read = names & set(term.loss.signature.column_names)
        influences |= influential(
            term.loss, column_kinds(program.graph, node, term.loss), term.settings, read
        )
        influences |= {term.where} if term.where else set()
    return frozenset(influences)


def _zero(program: Program, updates: list[Node]) -> Iterator[Problem]:
    """Yield a problem for each loss whose gradient is always zero on synthetic rows."""
    from rlflow.compiler.check.influence import has_gradient
    from rlflow.compiler.check.losses import column_kinds

    for node in updates:
        for term in _terms(program, node):
            kinds = column_kinds(program.graph, node, term.loss)
            if kinds is not None and not has_gradient(term.loss, kinds, term.settings):
                yield Problem(
                    "loss-zero-gradient",
                    f"loss '{term.loss.name}' gives '{node.role}' a gradient of zero for any values of its "
                    "columns",
                    node.place,
                    term.loss.place,
                    found="a gradient of exactly 0 on all synthetic rows",
                    expected="a gradient other than 0 for some values",
                    remedy="compute the value from new."
                    + " or new.".join(term.loss.new)
                    + ", without a factor of 0",
                )


def _unreached(program: Program, reward: Node, reach: Reach, learning: list[Node]) -> Problem:
    reason = next(
        (term.loss for node in learning for term in _terms(program, node) if term.loss.unrewarded), None
    )
    if reason is not None:
        return _waived(reward, reason)
    target = next((reach.targets[node.name] for node in learning if node.name in reach.targets), None)
    path, definition = _broken(program, target, reach)
    roles = listed(dict.fromkeys(f"'{node.role}'" for node in learning))
    return Problem(
        "reward-unreached",
        f"the scores of '{reward.name}' do not reach an update of {roles}, so nothing is learned from them",
        reward.place,
        definition,
        found=path,
        expected="a path from the scores to the gradient of an update",
        remedy='make the loss read a column that is computed from the scores; or write @loss(unrewarded="reason") '
        "if it needs no reward",
    )


def _broken(program: Program, target: ReachedUpdate | None, reach: Reach) -> tuple[str, Place | None]:
    """Describe the scores' path up to where it ends, and return the place where it does."""
    if target is None:
        return f"{reach.furthest}; no update reads this", reach.furthest.place
    name, step = max(target.columns.items(), key=lambda item: item[1].steps)
    loss = program.loss(target.node.name)
    end = PathStep(
        f"{target.node.name} reads '{name}', but the gradient of loss '{loss.name}' does not depend on it",
        loss.place,
        step,
    )
    return str(end), loss.place


def _unrewarded(program: Program, update: Node, rewards: list[Node]) -> Iterator[Problem]:
    """Yield a warning for a role that samples and is trained, but that no reward reaches.

    It becomes a note if the author declared that the role's loss needs no reward.
    """
    loss = next((term.loss for term in _terms(program, update) if term.loss.unrewarded), None)
    if loss is not None:
        yield _waived(rewards[0], loss)
        return
    loss = _terms(program, update)[0].loss
    yield Problem(
        "role-untaught",
        f"role '{update.role}' samples and is trained, but no reward reaches its updates",
        update.place,
        loss.place,
        found=f"columns {', '.join(loss.signature.column_names) or 'none'}; the scores influence none of them",
        expected=f"a column that depends on the scores of {listed(node.name for node in rewards)}",
        remedy='compute a column of the loss from the scores; or write @loss(unrewarded="reason") if it '
        "needs no reward",
        severity="warning",
    )


def _waived(reward: Node, loss: Loss) -> Problem:
    return Problem(
        "reward-waived",
        f"the scores of '{reward.name}' do not reach the loss '{loss.name}', and its author declared that "
        "they need not",
        reward.place,
        loss.place,
        found=f"unrewarded={loss.unrewarded!r}",
        expected="a reason that holds for this run",
        remedy="nothing, if the reason holds",
        severity="note",
    )


def _rewardless(update: Node, loss: Loss) -> Problem:
    return Problem(
        "reward-waived",
        f"the flow calls no reward, and the author of loss '{loss.name}' declared that it needs none",
        update.place,
        loss.place,
        found=f"unrewarded={loss.unrewarded!r}",
        expected="a reason that holds for this run",
        remedy="nothing, if the reason holds",
        severity="note",
    )


def _no_signal(program: Program, updates: list[Node]) -> Iterator[Problem]:
    """Yield a note if there is nothing to learn from but the model's own samples.

    Rewards, labels in the data and teacher models all count as something to learn from. The note says so if
    the author declared that a loss needs no reward.
    """
    if _has_signal(program.graph):
        return
    waiving = next(
        ((node, term.loss) for node in updates for term in _terms(program, node) if term.loss.unrewarded),
        None,
    )
    if waiving is not None:
        yield _rewardless(*waiving)
        return
    yield Problem(
        "no-signal",
        f"flow '{program.graph.name}' has no reward, label or teacher model: it can only learn from its "
        "own samples",
        updates[0].place,
        found="no call of a reward; no update reads a column of the data; no log-probs of another model",
        expected="a source to learn from other than the trained model",
        remedy='call a reward: batch |= reward(batch); or write @loss(unrewarded="reason") if it needs no '
        "reward",
        severity="note",
    )


def _has_signal(graph: Graph) -> bool:
    """Return True if the updates learn from something other than the trained models.

    That can be a column from the data, encoded text, a model that isn't trained, or a stage that scores
    strings.
    """
    trained = {use.name for use in graph.roles if use.trained}
    by_id: Mapping[int, Node] = {node.id: node for node in graph.nodes}
    for node in graph.nodes:
        read = {
            by_id[item.column.node].op
            for item in node.inputs
            if item.parameter not in ("prompt_tokens", "temperature")
        }
        scored = {item.parameter for item in node.inputs} & set(SIGNALS)
        texts = {
            o.name
            for item in node.inputs
            for o in by_id[item.column.node].outputs
            if o.name == item.column.name and o.kind is not None and o.kind.level is Level.TEXT
        }
        if (node.op is Op.UPDATE and Op.DATA in read) or (
            node.op is Op.STAGE and (scored or texts or Op.DATA in read)
        ):
            return True
        if node.op is Op.ENCODE or node.body is not None:
            return True
        if node.op in (Op.LOGPROBS, Op.VALUES) and node.role not in trained:
            return True
    return False
