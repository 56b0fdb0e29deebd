"""Check flows whose rows may be sampled with older weights, ahead of training or by earlier iterations.

With a staleness of at most K, rows of iteration i are sampled with the weights after iteration i-1-K or
later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlflow.author.joint import terms
from rlflow.author.loss import Loss
from rlflow.author.node_options import ReadOptions
from rlflow.compiler.graph.ancestry import ahead_of_training, sources
from rlflow.compiler.graph.due import Narrowed, parts
from rlflow.compiler.graph.model import SETTING, Column, Graph, Node, Op
from rlflow.compiler.trace.compile import Program
from rlflow.compiler.trace.drawn_by import stale_problem
from rlflow.errors import Problem, listed

UNDECIDED = "side effects that no seed reproduces (pure=False)"  # read by a stage with side effects


def stale_problems(program: Program, staleness: int) -> Iterator[Problem]:
    """Yield the problems that a flow has when rows may be sampled with older weights.

    Each loss must correct for them, and nodes that run ahead of training mustn't read what training changes.
    """
    if staleness < 0:
        yield Problem(
            "staleness-range",
            "the staleness bound is negative",
            found=f"--staleness {staleness}",
            expected="a number of iterations, at least 0 (0: sample with the newest weights)",
            remedy="--staleness 0",
        )
    if staleness < 1:
        yield from drawn_problems(program)
        return
    for repeated in program.graph.nodes:
        if repeated.body is not None:
            yield from repeat_problems(program.graph, repeated, repeated.body, staleness)
    yield from chain_problems(program.graph, staleness)
    if program.drawn_by is not None:
        yield from stale_problem(program.drawn_by, staleness)
    yield from dict.fromkeys(
        problem
        for part in parts(program.graph)
        for problem in (*_carried_problems(part, staleness), *_uncorrected(program, part.graph, staleness))
    )


def _carried_problems(part: Narrowed, staleness: int) -> Iterator[Problem]:
    """Yield the problems of repeats whose groups lack a column in some iterations.

    Groups that are carried over are joined with those of a later iteration, which needs the same columns.
    """
    for i, body in part.bodies.items():
        for item in body.missing_results:
            node, giver = part.graph.nodes[i], body.idle.get(item.column.node)
            yield Problem(
                "staleness-repeat",
                f"--staleness {staleness}: '{node.name}' gives '{item.parameter}' only in some iterations, "
                "so its groups cannot be carried over to another iteration",
                giver.place if giver else node.place,
                node.place,
                found=f"'{giver.name}' with {giver.schedule}" if giver else item.parameter,
                expected="the same columns in each iteration",
                remedy="remove its every= and after=, call it after the `repeat`, or remove --staleness",
            )


def _uncorrected(program: Program, graph: Graph, staleness: int) -> Iterator[Problem]:
    """Yield the problems of updates that don't correct for older weights.

    ``graph``: the program's graph, in which some nodes may be idle.
    """
    program = replace(program, graph=graph)
    generates = {use.name for use in graph.roles if use.generates}
    for node in graph.nodes:
        for loss in uncorrected(program, node) if node.op is Op.UPDATE and node.role in generates else ():
            if loss.stale_ok:
                yield Problem(
                    "stale-waived",
                    f"the loss '{loss.name}' trains '{node.role}' on rows of older weights without "
                    "correcting for them, and its author declared that it may",
                    node.place,
                    loss.place,
                    found=f"stale_ok={loss.stale_ok!r}",
                    expected="a reason that holds for this run",
                    remedy="nothing, if the reason holds",
                    severity="note",
                )
                continue
            yield Problem(
                "stale-uncorrected",
                f"--staleness {staleness}: the loss '{loss.name}' trains '{node.role}' on rows of older "
                "weights without correcting for them",
                node.place,
                loss.place,
                found=f"columns {', '.join(loss.signature.column_names)}",
                expected="a column that depends on sampled_logprobs",
                remedy="add before the update:  batch |= truncated_weights(batch, cap=2.0)\n            and "
                "in the loss:  take `weights` and multiply the value by it",
            )


def repeat_problems(graph: Graph, repeated: Node, body: Graph, staleness: int) -> Iterator[Problem]:
    """Yield the problems with a `repeat` that runs ahead of training.

    Weights and state may change while it runs. So in its body, only sampling may read trained weights,
    because the generator has its own copy, and nothing may read state.
    """
    changed = {slot.name for slot in graph.state if graph.nodes[slot.final.node].op is not Op.STATE}
    for node in body.nodes:
        if node.body is not None:
            yield from repeat_problems(graph, repeated, node.body, staleness)
            continue
        reads = (
            [f"the weights of '{node.role}'"]
            if node.role in graph.changed_roles and node.op is not Op.GENERATE
            else []
        )
        reads += [
            f"the state '{item.column.name}'" for item in node.inputs if _of_state(body, item.column, changed)
        ]
        reads += [UNDECIDED] if node.impure_stage else []
        reads += _memory_of(node)
        if reads:
            yield Problem(
                "staleness-repeat",
                f"--staleness {staleness}: '{node.name}' within '{repeated.name}' reads {reads[0]}, and "
                "training changes that, so the `repeat` cannot run ahead of training",
                node.place,
                repeated.place,
                found=listed(reads),
                expected="a body in which only sampling reads what training changes",
                remedy=_may_be_old(node) or f"call '{node.name}' after the `repeat`, or remove --staleness",
            )


def chain_problems(graph: Graph, staleness: int) -> Iterator[Problem]:
    """Yield a problem for each node that reads what training changes before a sampling call.

    Such a node would run ahead of training, just like the sampling call itself.
    """
    changed = {slot.name for slot in graph.state if graph.nodes[slot.final.node].op is not Op.STATE}
    ahead = ahead_of_training(graph)
    yield from _computed_sampling(graph, changed, staleness)
    for node in (graph.nodes[i] for i in sorted(ahead) if graph.nodes[i].op not in (Op.GENERATE, Op.REPEAT)):
        reads = [f"the weights of '{node.role}'"] if node.role in graph.changed_roles else []
        reads += [
            f"the state '{item.column.name}'"
            for item in node.inputs
            if _of_state(graph, item.column, changed)
        ]
        reads += [
            f"the state '{output.name}', to set it" for output in node.outputs if output.name in changed
        ]
        reads += [UNDECIDED] if node.impure_stage else []
        reads += _memory_of(node)
        if reads:
            later = next(
                graph.nodes[i].name
                for i in sorted(ahead)
                if graph.nodes[i].op in (Op.GENERATE, Op.REPEAT)
                and node.name in graph.before(graph.nodes[i].name)
            )
            yield Problem(
                "staleness-chain",
                f"--staleness {staleness}: '{later}' samples from the rows of '{node.name}', which reads "
                f"{reads[0]}, and training changes that",
                node.place,
                graph.by_name[later].place,
                found=listed(reads),
                expected="nodes before a sampling call that read nothing that training changes",
                remedy=_may_be_old(node) or f"sample before '{node.name}', or remove --staleness",
            )


def _memory_of(node: Node) -> list[str]:
    """Return what a node that runs ahead of training reads of memory, unless its author said that it may."""
    if node.op is Op.DRAW:
        return [f"what earlier iterations put into '{node.memory}'"]
    if node.op is not Op.READ or node.options(ReadOptions).stale_ok is not None:
        return []
    return [f"what earlier iterations wrote into '{node.memory}'"]


def _may_be_old(node: Node) -> str:
    """Return the remedy for a read of memory that may as well read old numbers, or "" for other nodes."""
    if node.op is not Op.READ:
        return ""
    return (
        f'write {node.name}(…, stale_ok="the reason"), so that it misses the writes of the last iterations, '
        "as many as --staleness says; or remove --staleness"
    )


def _computed_sampling(graph: Graph, changed: set[str], staleness: int) -> Iterator[Problem]:
    """Yield a problem for each sampling setting that comes from state which iterations change."""
    edges = (
        (node, item)
        for node in graph.nodes
        if node.op is Op.GENERATE
        for item in node.inputs
        if item.parameter.startswith(SETTING)
    )
    for node, item in edges:
        name, state = item.parameter.removeprefix(SETTING), item.column.name
        if _of_state(graph, item.column, changed):
            yield Problem(
                "staleness-chain",
                f"--staleness {staleness}: '{node.name}' reads its {name} from the state '{state}', but "
                "sampling would run ahead of the iterations that change it",
                node.place,
                found=f'{name}=batch["{state}"]',
                expected=f"a {name} that does not depend on training: a setting, or a value computed from "
                "iteration or progress",
                remedy=f"compute the {name} in a stage that reads `progress`, or remove --staleness",
            )


def _of_state(body: Graph, column: Column, names: set[str]) -> bool:
    return body.nodes[column.node].op is Op.STATE and column.name in names


def uncorrected(program: Program, update: Node) -> Iterator[Loss]:
    """Yield those losses of an update that don't correct for older weights.

    To do so, a loss must read a column that depends on the `sampled_logprobs` of its own rows.
    """
    loss = program.loss(update.name)
    if not has_samples(program.graph, update.axis):
        return
    from_sampling = depends_on_sampling(program.graph, update.axis)
    read = {
        item.parameter
        for item in update.inputs
        if item.column in from_sampling and not item.parameter.startswith(SETTING)
    }
    if read - set(loss.signature.column_names):  # such as the mask, which applies to every loss
        return
    for term in terms(loss, {}, None):
        if not read & set(term.loss.signature.column_names):
            yield term.loss


def depends_on_sampling(graph: Graph, rows: int) -> set[Column]:
    """Return the columns computed from the `sampled_logprobs` of the rows on axis ``rows``.

    If these rows were chosen from others, the others' `sampled_logprobs` count as well. If they were joined,
    a column must depend on the `sampled_logprobs` of every part that has sampled rows. It isn't enough for a column to depend on
    the sampled tokens, or on log-probs of unrelated rows, such as those of a baseline.
    """
    columns: set[Column] = set()
    own = sources(graph.axes, rows)
    for node in graph.nodes:
        names: set[str] = set()
        if node.op is Op.CONCAT and node.makes in own:
            names = {output.name for output in node.outputs if _of_each(graph, node, output.name, columns)}
        elif node.body and node.makes in own:
            inner = depends_on_sampling(node.body, node.body.rows)
            names = {item.parameter for item in node.body.results if item.column in inner}
        elif node.op in (Op.GENERATE, Op.DRAW) and node.makes in own:
            names = {output.name for output in node.outputs if output.source == "sampled_logprobs"}
        elif node.op is Op.STAGE and any(item.column in columns for item in node.inputs):
            names = {output.name for output in node.outputs}
        columns |= {Column(node.id, name) for name in names}
    return columns


def _of_each(graph: Graph, node: Node, name: str, columns: set[Column]) -> bool:
    """Return True if ``columns`` has the column ``name`` of every part with sampled rows that the node joins."""
    given = {item.parameter: item.column for item in node.inputs}
    sampled = [
        f"{number}.{name}"
        for number, part in enumerate(graph.axes[node.rows_axis].parts)
        if has_samples(graph, part)
    ]
    return bool(sampled) and all(given.get(parameter) in columns for parameter in sampled)


def has_samples(graph: Graph, rows: int) -> bool:
    """Return True if rows on the axis ``rows`` were sampled, and not only given by the data or encoded.

    Rows in a buffer were sampled by earlier iterations.
    """
    own = sources(graph.axes, rows)
    return any(node.op in (Op.GENERATE, Op.REPEAT, Op.DRAW) and node.makes in own for node in graph.nodes)


def drawn_problems(program: Program) -> Iterator[Problem]:
    """Yield a problem for each loss that compares drawn rows with the weights of now, not with those of then.

    Such a loss reads log-probs that the trained role computes in this iteration. For drawn rows, they differ
    from the log-probs at sampling, so the loss must also read a column that depends on `sampled_logprobs`.
    """
    graph = program.graph
    for node in graph.nodes:
        draw = _draw(graph, node) if node.op is Op.UPDATE else None
        if draw is None:
            continue
        recomputed = _recomputed(graph, node.role)
        read = {item.parameter for item in node.inputs if item.column in recomputed}
        for loss in uncorrected(program, node):
            if loss.stale_ok or not read & set(loss.signature.column_names):
                continue
            yield Problem(
                "drawn-uncorrected",
                f"the loss '{loss.name}' trains '{node.role}' on rows of '{draw.name}', which older weights "
                "sampled, without correcting for them",
                node.place,
                loss.place,
                found=f"columns {', '.join(loss.signature.column_names)}",
                expected="a column that depends on the sampled_logprobs of all rows",
                remedy="add before the update:  batch |= truncated_weights(batch, cap=2.0)\n            and "
                "in the loss:  take `weights` and multiply the value by it",
            )


def _draw(graph: Graph, update: Node) -> Node | None:
    """Return a draw whose rows the update learns from, or None."""
    own = sources(graph.axes, update.axis)
    return next((node for node in graph.nodes if node.op is Op.DRAW and node.makes in own), None)


def _recomputed(graph: Graph, role: str | None) -> set[Column]:
    """Return the log-probs that a role computes, and all columns that stages compute from them."""
    columns: set[Column] = set()
    for node in graph.nodes:
        own = node.op is Op.LOGPROBS and node.role == role
        if own or (node.op is Op.STAGE and any(item.column in columns for item in node.inputs)):
            columns |= {Column(node.id, output.name) for output in node.outputs}
    return columns
