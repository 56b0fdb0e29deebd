"""Stages with side effects: what they change outside of columns, state and weights is in no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.author.stage import Stage
from rlflow.compiler.trace.compile import Program, used_nodes
from rlflow.errors import Problem


def side_effect_problems(program: Program) -> Iterator[Problem]:
    """A warning for each stage with side effects that the flow calls, at its first call, and a note for one that a plan of several ranks
    refuses."""
    warned: set[str] = set()
    for node in used_nodes(program.graph):
        stage = program.functions.get(node.name)
        if not isinstance(stage, Stage) or stage.pure or stage.digest in warned:
            continue
        warned.add(stage.digest)
        held = f", but for the weights of '{stage.on}'" if stage.on else ""
        yield Problem("side-effects", f"stage '{stage.name}' has side effects that no checkpoint holds", node.place, stage.place,
                      found=f"pure=False{held}", expected="a run that a checkpoint holds whole, so that `rlflow resume` goes on with it",
                      remedy="keep numbers in @flow(state=…); without side effects, leave pure=False out; else a resumed run, and one that "
                             "recovers from a lost worker, starts without them", severity="warning")
        if stage.on and node.dispatch != "ALL":
            yield Problem("lone-change", f"on several ranks stage '{stage.name}' would not change the weights of '{stage.on}' alike",
                          node.place, stage.place, found=f"dispatch={node.dispatch}, pure=False",
                          expected="dispatch=ALL, without which a pool of several ranks is refused",
                          remedy="write dispatch=ALL; nothing, if the role always has one rank", severity="note")
