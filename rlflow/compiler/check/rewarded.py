"""Whether rewards are learned from: each reward that a flow calls has to reach an update that learns from it,
and what is trained without any has to say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlflow.author.columns import Level
from rlflow.author.joint import LossTerm
from rlflow.author.loss import Loss
from rlflow.compiler.check.reached import Arrival, Hop, Walk
from rlflow.compiler.graph.model import SETTING, Graph, Node, Op
from rlflow.compiler.trace.compile import Program, all_nodes
from rlflow.errors import Place, Problem, listed

# by which a stage of the author's judges
SIGNALS = ("completion", "answer", "finish", "prompt", "chosen", "turn_rewards", "episode_score")


def reward_problems(program: Program) -> Iterator[Problem]:
    """Errors of rewards whose scores reach no update that they should, notes of those that need not, and a
    note where a flow has nothing to learn from. Needs a flow whose losses are sound."""
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
    walks = [Walk(graph, node, tried) for node in rewards]
    players = {use.name for use in graph.roles if use.generates and use.trained}
    learning = [node for node in updates if node.role in players] or updates
    for node, walk in zip(rewards, walks, strict=True):
        if not any(update.name in walk.reached for update in learning):
            yield _unreached(program, node, walk, learning)
    reached = {graph.by_name[name].role for walk in walks for name in walk.reached}
    for role in sorted(players - reached) if reached & players else ():
        update = next(node for node in updates if node.role == role)
        yield from _untaught(program, update, rewards)


def _terms(program: Program, node: Node) -> list[LossTerm]:
    from rlflow.compiler.check.losses import loss_terms

    return loss_terms(program, node, program.loss(node.name))


def _influences(program: Program, node: Node) -> frozenset[str]:
    """The parameters of an update whose columns change its gradient: of any of its losses, or by choosing its
    rows."""
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
    """Losses whose gradient is zero on all rows that were tried."""
    from rlflow.compiler.check.influence import has_gradient
    from rlflow.compiler.check.losses import column_kinds

    for node in updates:
        for term in _terms(program, node):
            kinds = column_kinds(program.graph, node, term.loss)
            if kinds is not None and not has_gradient(term.loss, kinds, term.settings):
                yield Problem(
                    "loss-zero-gradient",
                    f"loss '{term.loss.name}' gives '{node.role}' a gradient of zero, whatever its columns "
                    "are",
                    node.place,
                    term.loss.place,
                    found="a gradient that is exactly 0 on all rows that were tried",
                    expected="a gradient that some column makes other than 0",
                    remedy="let the value depend on new."
                    + " or new.".join(term.loss.new)
                    + ", without a factor of 0",
                )


def _unreached(program: Program, reward: Node, walk: Walk, learning: list[Node]) -> Problem:
    reason = next(
        (term.loss for node in learning for term in _terms(program, node) if term.loss.unrewarded), None
    )
    if reason is not None:
        return _waived(reward, reason)
    arrival = next((walk.arrivals[node.name] for node in learning if node.name in walk.arrivals), None)
    path, definition = _broken(program, arrival, walk)
    roles = listed(dict.fromkeys(f"'{node.role}'" for node in learning))
    return Problem(
        "reward-unreached",
        f"the scores of '{reward.name}' reach no update of {roles}: nothing is learned from them",
        reward.place,
        definition,
        found=path,
        expected="a path from the scores to the gradient of an update",
        remedy='let the loss use a column that is computed from the scores; or say @loss(unrewarded="why '
        'it need not")',
    )


def _broken(program: Program, arrival: Arrival | None, walk: Walk) -> tuple[str, Place | None]:
    """The path up to where it breaks, in words, and the place of what breaks it."""
    if arrival is None:
        return f"{walk.furthest}, which no update reads", walk.furthest.place
    name, hop = max(arrival.columns.items(), key=lambda item: item[1].steps)
    loss = program.loss(arrival.node.name)
    end = Hop(
        f"{arrival.node.name} reads '{name}', and the gradient of loss '{loss.name}' is the same "
        "whatever it is",
        loss.place,
        hop,
    )
    return str(end), loss.place


def _untaught(program: Program, update: Node, rewards: list[Node]) -> Iterator[Problem]:
    """A role that samples and is trained while other roles alone learn from the rewards."""
    loss = next((term.loss for term in _terms(program, update) if term.loss.unrewarded), None)
    if loss is not None:
        yield _waived(rewards[0], loss)
        return
    loss = _terms(program, update)[0].loss
    yield Problem(
        "role-untaught",
        f"role '{update.role}' samples and is trained, and no reward reaches its updates",
        update.place,
        loss.place,
        found=f"columns {', '.join(loss.signature.column_names) or 'none'}, on none of which a score has "
        "influence",
        expected=f"a column that depends on the scores of {listed(node.name for node in rewards)}",
        remedy='compute the column from the scores; or say @loss(unrewarded="why it need not")',
        severity="warning",
    )


def _waived(reward: Node, loss: Loss) -> Problem:
    return Problem(
        "reward-waived",
        f"the scores of '{reward.name}' do not reach the loss '{loss.name}', as its author says they "
        "need not",
        reward.place,
        loss.place,
        found=f"unrewarded={loss.unrewarded!r}",
        expected="a reason that holds for this run",
        remedy="nothing, if it does",
        severity="note",
    )


def _unpaid(update: Node, loss: Loss) -> Problem:
    return Problem(
        "reward-waived",
        f"the flow calls no reward, and loss '{loss.name}' needs none, as its author says",
        update.place,
        loss.place,
        found=f"unrewarded={loss.unrewarded!r}",
        expected="a reason that holds for this run",
        remedy="nothing, if it does",
        severity="note",
    )


def _no_signal(program: Program, updates: list[Node]) -> Iterator[Problem]:
    """No reward, no label of the data and no teacher: whatever the updates do comes from the model's own
    samples."""
    if _taught(program.graph):
        return
    waiving = next(
        ((node, term.loss) for node in updates for term in _terms(program, node) if term.loss.unrewarded),
        None,
    )
    if waiving is not None:
        yield _unpaid(*waiving)
        return
    yield Problem(
        "no-signal",
        f"flow '{program.graph.name}' has no reward, no label and no teacher: it can only learn from its own "
        "samples",
        updates[0].place,
        found="no call of a reward, no column of the data in an update, no other model's log-probs",
        expected="something outside of the trained model to learn from",
        remedy='call a reward: batch |= reward(batch); or say @loss(unrewarded="why it needs none")',
        severity="note",
    )


def _taught(graph: Graph) -> bool:
    """Whether anything but the trained models has a say: a column of the data, a model that is not trained, a
    stage that judges texts."""
    trained = {use.name for use in graph.roles if use.trained}
    by_id: Mapping[int, Node] = {node.id: node for node in graph.nodes}
    for node in graph.nodes:
        read = {
            by_id[item.column.node].op
            for item in node.inputs
            if item.parameter not in ("prompt_tokens", "temperature")
        }
        judged = {item.parameter for item in node.inputs} & set(SIGNALS)
        texts = {
            o.name
            for item in node.inputs
            for o in by_id[item.column.node].outputs
            if o.name == item.column.name and o.kind is not None and o.kind.level is Level.TEXT
        }
        if (
            node.op is Op.UPDATE
            and Op.DATA in read
            or node.op is Op.STAGE
            and (judged or texts or Op.DATA in read)
        ):
            return True
        if node.op in (Op.LOGPROBS, Op.VALUES) and node.role not in trained or node.body is not None:
            return True
    return False
