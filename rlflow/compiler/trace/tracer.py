"""The tracer, which calls a flow with symbols and records a graph.

It records calls of stages and of role methods, but not tensor operations. When it finds a mistake, it reports
it and goes on if it can. After a missing column is reported, it counts as present, so that one trace also
finds later, unrelated mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlflow.author import methods
from rlflow.author.columns import OF_PROMPTS, field_column, scalar, standard_kind
from rlflow.author.joint import JointLoss, joined, specification
from rlflow.author.loss import Loss
from rlflow.author.methods import Setting, missing_setting, unknown_setting
from rlflow.author.node_options import GenerateOptions, Pairs, ShownOptions, UpdateOptions, plain
from rlflow.author.schedule import CallSchedule
from rlflow.author.signature import REQUIRED, ColumnParameter, Signature
from rlflow.author.source_lines import call_place
from rlflow.author.stage import Stage
from rlflow.compiler.graph.model import FRESH_OPTIMIZER, SETTING, Input, Op, Output, RowAxis
from rlflow.compiler.trace import column_rules, environment_rules, repeat_rules, rules
from rlflow.compiler.trace.graph_recorder import is_scalar
from rlflow.compiler.trace.memory_tracer import MemoryTracer
from rlflow.compiler.trace.symbols import CallSettings, SymbolicBatch, call_settings
from rlflow.errors import Place

if TYPE_CHECKING:
    from rlflow.rewards.environments.environment_spec import EnvironmentSpec

REST = ("prompt", "answer")  # columns that a ``reset`` with **kwargs gets, if the rows have them


class Tracer(MemoryTracer):
    """Records a flow's calls while the flow is traced."""

    def stage(
        self, stage: Stage, batch: Any, gives: tuple[str, ...] | None, settings: dict[str, Any]
    ) -> SymbolicBatch:
        """Record a call of a stage and return the columns that it computes."""
        what, place = f"stage '{stage.name}'", call_place()
        batch = self.mine(batch, what)
        outputs = self._outputs(what, stage.gives, gives, place, stage.place)
        axis = self.recorded.axes[batch.axis]
        schedule, settings = self._scheduled(what, settings, stage.signature.settings)
        bound, edges = self._settings(what, stage.signature, settings, place, stage.place, ("generator",))
        inputs = self.inputs(batch, stage.signature.columns, what, stage.place)
        sound = [output for output in outputs if stage.gives[output.source] in (None, output.kind)]
        self.report(
            *rules.stage_rules(stage, sound, axis, place),
            *rules.role_rules(stage, self.context.roles, place),
            *rules.state_rules(stage, outputs, self.state, place),
        )
        if len(inputs) == len(stage.signature.columns):
            self.report(
                *rules.length_rules(
                    stage, sound, [batch.columns.get(item.parameter) for item in inputs], place
                )
            )
        node = self.add(
            Op.STAGE,
            stage.name,
            batch.axis,
            inputs=inputs + edges,
            outputs=outputs,
            settings=ShownOptions(_shown(bound)),
            role=stage.on,
            dispatch=str(stage.dispatch),
            rows=stage.rows,
            digest=stage.digest,
            timeout=stage.timeout,
            pure=stage.pure,
            schedule=schedule,
            place=place,
            definition=stage.place,
        )
        self.functions[node.name], self.bound[node.name] = stage, bound
        result = self.symbols(node)
        self.state = self.state | {
            name: source for name, source in result.sources.items() if name in self.state
        }
        if self.depth and (changed := [output.name for output in outputs if output.name in self.state]):
            self.report(repeat_rules.state_in_body(what, changed, place))
        return result

    def generate(self, role: str, prompts: Any, settings: dict[str, Any]) -> SymbolicBatch:
        """Record a `generate` call and return the sampled rows."""
        what, place = f"{role}.generate", call_place()
        prompts = self.mine(prompts, what)
        schedule, settings = self._scheduled(what, settings)
        call, bound = self._sampling_settings(what, settings, place)
        if self.recorded.axes[prompts.axis].grouped:
            self.report(rules.not_prompts(what, place))
        reads = ("prompt_tokens", *(name for name in ("prefix_length",) if name in prompts.sources))
        inputs = self.inputs(
            prompts, [ColumnParameter(name, standard_kind(name), False) for name in reads], what, None
        )
        environment = self.context.environments.get(role) or self.context.environments.get("")
        if environment is not None:
            inputs += self._environment_inputs(environment, prompts, what, place)
            self.report(*environment_rules.environment_settings(environment, bound["lengths"], what, place))
        self.asked_by(role, prompts.axis)
        makes = self.axis(RowAxis(prompts.axis, bound["samples"], True))
        outputs = tuple(
            Output(name, methods.KINDS[name], name) for name in (*methods.GENERATE_GIVES, "group")
        )
        more: dict[str, Any] = {}
        sampling = call.without_edges(bound)
        seconds = methods.DEADLINES["generate"]
        if environment is not None:
            outputs += tuple(Output(name, standard_kind(name), name) for name in methods.EPISODE_GIVES)
            seconds += environment.bounds.turns * environment.bounds.seconds
            more = {"digest": environment.digest, "definition": environment.place}
            sampling["environment"] = str(environment)
        node = self.add(
            Op.GENERATE,
            what,
            prompts.axis,
            inputs=inputs + call.edges,
            outputs=outputs,
            settings=GenerateOptions(**sampling),
            role=role,
            makes=makes,
            timeout=seconds,
            schedule=schedule,
            place=place,
            **more,
        )
        return self.batch(makes, prompts.sources | self.symbols(node).sources)

    def _sampling_settings(
        self, what: str, settings: dict[str, Any], place: Place | None
    ) -> tuple[CallSettings, dict[str, Any]]:
        """Return a `generate` call's settings, both as in the flow and as overridden by the run."""
        own = methods.sampling_of(self.context.sampling, what, self._unique(what))
        own = {name: value for name, value in own.items() if name != "temperature" or self.temperatures}
        call = self._call_settings(what, settings, _defaults(methods.GENERATE), methods.COMPUTED.__contains__)
        call = replace(
            call, edges=tuple(item for item in call.edges if item.parameter.removeprefix(SETTING) not in own)
        )
        bound = methods.resampled(self._bound(what, methods.GENERATE, call.values, place), own)
        self.report(*methods.too_short(bound, self.context.sampling, what, self._unique(what), place))
        return call, bound

    def _environment_inputs(
        self, environment: EnvironmentSpec, prompts: SymbolicBatch, what: str, place: Place | None
    ) -> tuple[Input, ...]:
        """Return what an environment's ``reset`` reads: columns, and fields in the data."""
        source = environment.source
        names = dict.fromkeys(source.required, True) | dict.fromkeys(
            (*source.optional, *(REST if source.rest else ())), False
        )
        columns = {
            column: name
            for name in names
            if (column := name if name in prompts.sources else field_column(name)) in prompts.sources
        }
        for name, required in names.items():
            if required and name not in columns.values():
                self._missing(
                    prompts,
                    name,
                    what,
                    place,
                    source.place,
                    environment_rules.environment_missing(
                        environment, name, self.visible(prompts), place, self.context.fields
                    ),
                )
        if source.rest:
            columns |= {name: name for name in prompts.sources if name.startswith(field_column(""))}
        self.report(
            *(
                environment_rules.environment_kind(environment, name, kind, place)
                for name in columns
                if (kind := prompts.sources[name].kind) is not None
                and kind.level not in environment_rules.ONE_PER_ROW
            )
        )
        return tuple(Input(name, prompts.sources[name].column) for name in columns)

    def forward(
        self, role: str, method: str, batch: Any, gives: str | tuple[str, ...], settings: Mapping[str, Any]
    ) -> SymbolicBatch:
        """Record a `logprobs` or `values` call.

        If ``gives`` has two names, `logprobs` also returns entropies.
        """
        what, place = f"{role}.{method}", call_place()
        schedule = self._only_schedule(what, settings)
        batch = self.mine(batch, what)
        names = (gives,) if isinstance(gives, str) else tuple(gives)
        sources = {"logprobs": ("logprobs", "entropy"), "values": ("values",)}[method][: max(len(names), 1)]
        outputs = self._outputs(
            what, {source: methods.KINDS[source] for source in sources}, names, place, None
        )
        inputs = self._model_inputs(batch, what, ("temperature",) if method == "logprobs" else ())
        op = Op.LOGPROBS if method == "logprobs" else Op.VALUES
        node = self.add(
            op,
            what,
            batch.axis,
            inputs=inputs,
            outputs=outputs,
            role=role,
            timeout=methods.DEADLINES[method],
            schedule=schedule,
            place=place,
        )
        return self.symbols(node)

    def reward(
        self, role: str, batch: Any, gives: str | tuple[str, ...], settings: Mapping[str, Any]
    ) -> SymbolicBatch:
        """Record a reward call and return the scores.

        It's taken to be a reward model if the batch has tokens but no completion, and otherwise a reward
        function.
        """
        what, place = role, call_place()
        schedule = self._only_schedule(what, settings)
        batch = self.mine(batch, what)
        outputs = self._outputs(
            what,
            {"scores": methods.KINDS["scores"]},
            (gives,) if isinstance(gives, str) else tuple(gives),
            place,
            None,
        )
        inputs = self._reward_inputs(what, batch, place)
        node = self.add(
            Op.REWARD,
            role,
            batch.axis,
            inputs=inputs,
            outputs=outputs,
            role=role,
            timeout=methods.DEADLINES["reward"],
            schedule=schedule,
            place=place,
        )
        return self.symbols(node)

    def _reward_inputs(self, what: str, batch: SymbolicBatch, place: Place | None) -> tuple[Input, ...]:
        """Return the columns that a reward reads, including those that every reward gets."""
        model = "completion" not in batch.sources and "tokens" in batch.sources
        reads = methods.MODEL_READS if model else self.context.reward_reads
        # if there is no column for a parameter, it reads the field in the data with this name
        reads = tuple(
            field_column(name) if name not in batch.sources and field_column(name) in batch.sources else name
            for name in reads
        )
        # follow-up prompts have only the column "prompt"
        reads = tuple(
            name for name in reads if name == "prompt" or name not in OF_PROMPTS or name in batch.sources
        )
        for name in reads if not model else ():
            if name not in batch.sources and name not in self.state:
                of = self.context.reward_places.get(name)
                missing = column_rules.reward_missing(
                    what, name, self.visible(batch), place, of, self.context.fields
                )
                self._missing(batch, name, what, place, of, missing)
        needs = [ColumnParameter(name, standard_kind(name), False) for name in reads]
        more = [
            n
            for n in (*methods.MODEL_READS, "prompt", "entry", *methods.OF_EPISODES)
            if n in batch.sources and n not in reads
        ]
        self.note_dropped(batch, () if model else methods.OF_EPISODES, what)
        return self.inputs(batch, [*needs, *(ColumnParameter(name, None, True) for name in more)], what, None)

    def update(self, role: str, batch: Any, loss: Any, settings: dict[str, Any]) -> None:
        """Record an `update` call."""
        what, place = f"{role}.update", call_place()
        batch = self.mine(batch, what)
        if wrong := rules.no_losses(loss):
            return self.report(rules.not_a_loss(what, wrong[0], place))
        specified = specification(loss)
        own = {name: value for name, value in settings.items() if name in specified}
        rest = {name: value for name, value in settings.items() if name not in specified}
        own = self._call_settings(what, own, _defaults(specified), lambda name: False).values
        if isinstance(loss, tuple | list):
            loss, problems = joined(what, loss, own | rest, place)
            self.report(*problems)
        bound = self._bound(what, specified, own, place)
        schedule, fresh = methods.schedule_of(bound), bound.pop("fresh_optimizer")
        if isinstance(loss, JointLoss):
            bound |= {
                "losses": tuple(part.name for part in loss.losses),
                "scale": loss.scale,
                "where": loss.where,
            }
        of_loss, edges = self._settings(
            f"{what} with loss '{loss.name}'", loss.signature, rest, place, loss.place, also=tuple(specified)
        )
        # the settings of the update itself are not passed to its losses
        of_loss = {name: value for name, value in of_loss.items() if name not in specified}
        inputs = self._update_inputs(what, batch, loss) + edges + self._fresh_input(what, batch, fresh)
        levels = {name: kind.level if kind else None for name, kind in batch.columns.items()}
        self.report(
            *rules.update_rules(loss, self.recorded.axes[batch.axis], what, place),
            *rules.torn_groups(loss, levels, what, place),
        )
        node = self.add(
            Op.UPDATE,
            what,
            batch.axis,
            inputs=inputs,
            settings=UpdateOptions(**bound, own=_shown(of_loss)),
            role=role,
            rows=loss.rows,
            digest=loss.digest,
            timeout=methods.DEADLINES["update"],
            pure=False,
            schedule=schedule,
            place=place,
            definition=loss.place,
        )
        self.functions[node.name], self.bound[node.name] = loss, of_loss

    def _update_inputs(self, what: str, batch: SymbolicBatch, loss: Loss) -> tuple[Input, ...]:
        """Return the columns that an update reads for the model, then those that only its loss reads."""
        inputs = self._model_inputs(batch, what, ("temperature", "group"), ("mask",))
        known = {item.parameter for item in inputs}
        read = self.inputs(batch, loss.signature.columns, f"loss '{loss.name}'", loss.place)
        return inputs + tuple(item for item in read if item.parameter not in known)

    def _fresh_input(self, what: str, batch: SymbolicBatch, column: str | None) -> tuple[Input, ...]:
        """Return the input that tells whether an update starts with a fresh optimizer, if it has one.

        It must be a bool scalar with one value for all ranks, or a state.
        """
        source = None if column is None else self.scalar(column) or self.find(batch, column, what)
        if column is None or source is None:
            return ()
        one = self.recorded.nodes[source.column.node].dispatch != "ALL" and is_scalar(source.kind)
        if not one or not (column in self.state or (source.kind and source.kind.family == "bool")):
            parameter = ColumnParameter(column, scalar("bool"), False)
            self.report(column_rules.wrong_kind(what, parameter, source.kind, call_place(), None))
        return (Input(FRESH_OPTIMIZER, source.column),)

    def _settings(
        self,
        what: str,
        signature: Signature,
        settings: Mapping[str, Any],
        place: Place | None,
        definition: Place | None,
        skip: tuple[str, ...] = (),
        also: tuple[str, ...] = (),
    ) -> tuple[dict[str, Any], tuple[Input, ...]]:
        """Return the settings of a stage or loss, and the inputs for those that are scalar columns.

        ``skip``: parameters that aren't settings. ``also``: names of settings that the call itself has.
        """
        known = {name: default for name, default in signature.settings.items() if name not in skip}
        for name in settings:
            if name not in known and not signature.open_settings:
                self.report(unknown_setting(what, name, {**known, **dict.fromkeys(also)}, place, definition))
        for name, default in known.items():
            if default is REQUIRED and name not in settings:
                self.report(missing_setting(what, name, "a value", place, definition))
        call = self._call_settings(what, settings, known, signature.takes_float)
        bound = {name: default for name, default in known.items() if default is not REQUIRED} | call.values
        return call.without_edges(bound), call.edges

    def _call_settings(
        self,
        what: str,
        settings: Mapping[str, Any],
        defaults: Mapping[str, Any],
        takes: Callable[[str], bool],
    ) -> CallSettings:
        """Split a call's settings into values and scalar columns, and report problems.

        ``takes(name)`` tells whether a setting can be a column.
        """
        call = call_settings(what, settings, defaults, takes, self.recorded, call_place())
        self.report(*call.problems)
        return call

    def number(self, name: str) -> None:
        """Return None: there are no real batches in a trace."""

    def weight(self, role: str) -> float:
        """Return the weight of a role's reward, or 1 if the role isn't in ``*rewards``.

        Once the flow has read a role's weight, that role's scores aren't multiplied by it later.
        """
        self.weighed |= {role} & self.context.weights.keys()
        return self.context.weights.get(role, 1.0)

    def _only_schedule(self, what: str, settings: Mapping[str, Any]) -> CallSchedule:
        """Return the schedule of a call without settings of its own, and report any others as a problem."""
        schedule, unknown = self._scheduled(what, settings)
        known = {"gives": None, **methods.SCHEDULE}
        self.report(*(unknown_setting(what, name, known, call_place()) for name in unknown))
        return schedule


def _shown(settings: Mapping[str, Any]) -> Pairs:
    return tuple((name, plain(value)) for name, value in settings.items())


def _defaults(specification: Mapping[str, Setting]) -> dict[str, Any]:
    return {name: setting.default for name, setting in specification.items()}
