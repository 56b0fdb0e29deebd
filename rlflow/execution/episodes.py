"""Episodes: rows that are sampled turn by turn, with answers from an environment between the turns.

All rows take a turn together: the generator continues each row, and then the environments answer in parallel.
Sampled tokens are never re-encoded. Environment messages are encoded separately and masked out. Each turn may
use up whatever is left of ``max_tokens``, and has its own seed, derived from the row's. Turn 0 uses the row's
seed itself, so a row without environment messages is the same, bit for bit, as one sampled without an
environment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, group_column
from rlflow.author.columns import TABLE, Kind, Level, field_column
from rlflow.author.messages import CHANGES, Message, ToolCall, cut_to
from rlflow.author.seeds import derived, row_seeds, turn_seeds
from rlflow.errors import listed
from rlflow.rewards.environments.environment_pool import Answer, EnvironmentPool, Episode, Failure
from rlflow.training.protocols import Sampling

REST = ("prompt", "answer")  # columns that a ``reset`` with **kwargs gets, if the rows have them
# Characters to encode for each token of the limit. If a string is longer, only its beginning is encoded,
# which gives enough tokens.
CHARACTERS = 16
TRIES = 3  # attempts to shorten a message to the allowed number of tokens

Generate = Callable[[Batch, Sampling, Sequence[int]], Batch]  # method of a generator
EnvironmentText = str | list[Message]


@dataclass(frozen=True)
class Speech:
    """Encodes environment messages and decodes sampled tokens for the model of one role."""

    # token ids of strings after sampled ids
    speak: Callable[[Sequence[EnvironmentText], Sequence[Sequence[int]]], list[list[int]]]
    encode: Callable[[str], list[int]]  # token ids of a string by itself
    decode: Callable[[Sequence[Sequence[int]]], list[str]]
    # tool calls in sampled ids
    calls: Callable[[Sequence[Sequence[int]]], list[list[ToolCall]]] = lambda rows: [[] for _ in rows]


@dataclass(frozen=True)
class _Piece:
    """The tokens of a row from one turn, or from one environment message (turn -1)."""

    tokens: Tensor  # int64
    logprobs: Tensor
    versions: Tensor  # int64
    turn: int
    size: int  # number of tokens
    reward: float = 0.0


@dataclass(eq=False)
class _Row:
    """A row whose episode is running."""

    episode: Episode
    prompt: Tensor  # int64, token ids of the prompt
    pieces: list[_Piece] = field(default_factory=list)
    # messages of each turn, as the samples file shows them
    turns: list[dict[str, Any]] = field(default_factory=list)
    opening: EnvironmentText = ""
    text: str = ""  # sampled text of the last turn
    finish: str = ""  # empty while the episode is running
    failure: Failure | None = None
    score: float | None = None  # score from the environment, or None if it returns none
    length: int = 0  # tokens after the prompt
    # changes to the opening message; the log of the first turn reports them
    changed: dict[str, float] = field(default_factory=dict)

    def add(self, piece: _Piece) -> None:
        """Append the tokens of ``piece`` to the row."""
        self.pieces.append(piece)
        self.length += piece.size

    @property
    def context(self) -> Tensor:
        """The token ids from which the next turn is sampled: the prompt and all tokens so far."""
        return torch.cat([self.prompt, *(piece.tokens for piece in self.pieces)])

    def fail(self, failure: Failure) -> None:
        """End the episode with ``failure`` and without a score."""
        self.failure, self.finish = failure, "failed"


@dataclass
class Episodes:
    """Samples the rows of one `generate` call in an environment.

    ``sampling.max_tokens`` limits the total number of tokens in a row, including environment messages.
    """

    generate: Generate
    pool: EnvironmentPool
    sampling: Sampling
    speech: Speech

    def sampled(self, prompts: Batch, seeds: Sequence[int], seed: int) -> Batch:
        """Sample all rows. Return the columns of `generate`, plus the columns EPISODE_GIVES.

        Rows of the same prompt are adjacent. ``seeds``: one per row. ``seed``: the seed of the call, from
        which each prompt's environment seed is derived.
        """
        axis = prompts.axis.repeat(self.sampling.samples)
        rows = self._opened(prompts, axis, seed)
        if not any(row.opening for row in rows):
            first = self.generate(prompts.select("prompt_tokens"), self.sampling, seeds)
        else:
            first = self._from_here(rows, list(range(len(rows))), axis, seeds, 0)
        self._take(rows, list(range(len(rows))), first, 0)
        turn = 0
        while going := [place for place, row in enumerate(rows) if not row.finish]:
            turn += 1
            self._take(
                rows,
                going,
                self._from_here(rows, going, axis, turn_seeds([seeds[place] for place in going], turn), turn),
                turn,
            )
        self._scored(rows)
        alone = all(len(row.pieces) == 1 for row in rows)
        return self._batch(
            axis, rows, first, first["completion"] if alone else self._completions(rows, first["completion"])
        )

    def _opened(self, prompts: Batch, axis: Axis, seed: int) -> list[_Row]:
        """Start an episode for each row, with the same environment seed for all episodes of a prompt."""
        own = row_seeds(derived(seed, "environment"), prompts.axis.keys)
        values = _row_values(prompts, self.pool)
        copies = self.sampling.samples
        index = torch.arange(len(prompts)).repeat_interleave(copies).tolist()
        episodes, answers = self.pool.open(
            [values[place] for place in index], [own[place] for place in index]
        )
        ids = prompts.data["prompt_tokens"].split()
        rows = [_Row(episode, ids[place]) for episode, place in zip(episodes, index, strict=True)]
        speaking = []
        for row, answer in zip(rows, answers, strict=True):
            if isinstance(answer, Failure):
                # sample the first turn anyway, because a row needs at least one token
                row.failure = answer
            elif opening := answer["says"]:
                row.opening, row.changed = opening, _changes(answer)
                speaking.append(row)
        self._append_messages(speaking, [row.opening for row in speaking], [[] for _ in speaking])
        for row in speaking:
            if row.finish:  # the opening leaves no token to sample, so drop it
                row.finish, row.opening = "", ""
        return rows

    def _from_here(
        self, rows: Sequence[_Row], places: Sequence[int], axis: Axis, seeds: Sequence[int], turn: int
    ) -> Batch:
        """Sample one turn of the rows at ``places``.

        Each row continues from its own tokens, up to its own limit.
        """
        # all models of the run can process this many tokens
        most = max(len(row.prompt) for row in rows) + self.sampling.max_tokens
        parts, left = [], sorted(range(len(places)), key=lambda i: rows[places[i]].length)
        while left:
            budget = self.sampling.max_tokens - rows[places[left[0]]].length
            fits = [i for i in left if len(rows[places[i]].prompt) + rows[places[i]].length + budget <= most]
            parts.append((sorted(fits), budget))
            left = [i for i in left if i not in set(fits)]
        batches = [
            self._turn(rows, [places[i] for i in part], axis, [seeds[i] for i in part], budget, turn)
            for part, budget in parts
        ]
        order = torch.tensor([i for part, _ in parts for i in part])
        whole = batches[0] if len(batches) == 1 else Batch.concat(batches)
        return whole.rows(order.argsort())

    def _turn(
        self,
        rows: Sequence[_Row],
        places: Sequence[int],
        axis: Axis,
        seeds: Sequence[int],
        budget: int,
        turn: int,
    ) -> Batch:
        contexts = [rows[place].context for place in places]
        data = Data(
            Kind(Level.PROMPT, "int64"), torch.cat(contexts), torch.tensor([len(ids) for ids in contexts])
        )
        prompts = Batch(axis.take(torch.tensor(places)), {"prompt_tokens": data})
        least = min(self.sampling.min_tokens, budget) if not turn else 0
        return self.generate(
            prompts, replace(self.sampling, samples=1, max_tokens=budget, min_tokens=least), seeds
        )

    def _take(self, rows: Sequence[_Row], places: Sequence[int], sampled: Batch, turn: int) -> None:
        """Append the sampled tokens of a turn to the rows at ``places``, and let the environments answer."""
        lengths = sampled.data["tokens"].row_lengths
        columns = [
            sampled.data[name].value.split(lengths.tolist())
            for name in ("tokens", "sampled_logprobs", "policy_version")
        ]
        texts, finishes = list(sampled["completion"]), sampled["finish"]
        stopped, cut = {}, []
        for number, (place, length) in enumerate(zip(places, lengths.tolist(), strict=True)):
            row = rows[place]
            budget = self.sampling.max_tokens - row.length
            tokens, logprobs, versions = (column[number] for column in columns)
            if length > budget:
                tokens, logprobs, versions = tokens[:budget], logprobs[:budget], versions[:budget]
                cut.append(number)
            stopped[place] = finishes[number] == "stop" and length <= budget
            row.add(_Piece(tokens, logprobs, versions, turn, min(length, budget)))
        for number, text in zip(
            cut,
            self.speech.decode([rows[places[number]].pieces[-1].tokens.tolist() for number in cut]),
            strict=True,
        ):
            texts[number] = text
        for number, place in enumerate(places):
            rows[place].text = texts[number]
            rows[place].turns.append({"said": texts[number]})
            if (failure := rows[place].failure) is not None:
                rows[place].fail(failure)
        asked = [place for place in places if rows[place].failure is None]
        if self.pool.spec.tools:
            answers = self._run_tools([rows[place] for place in asked])
        else:
            answers = self.pool.step(
                [rows[place].episode for place in asked], [rows[place].text for place in asked]
            )
        self._continue_rows(
            [rows[place] for place in asked], answers, [stopped[place] for place in asked], turn
        )

    def _run_tools(self, rows: Sequence[_Row]) -> list[Answer]:
        """Run the tools that the rows called in the last turn, and return the answers.

        The answer to an invalid call describes the error, so that the model can try again. A turn without
        calls ends the episode.
        """
        calls = self.speech.calls([row.pieces[-1].tokens.tolist() for row in rows])
        faults = [[self._fault(call) for call in own] for own in calls]
        sound = [
            [(call.name, call.arguments) for call, fault in zip(own, wrong, strict=True) if not fault]
            for own, wrong in zip(calls, faults, strict=True)
        ]
        busy = [place for place, own in enumerate(sound) if own]
        answered = dict(
            zip(
                busy,
                self.pool.tools([rows[place].episode for place in busy], [sound[place] for place in busy]),
                strict=True,
            )
        )
        return [
            self._results(rows[place], calls[place], faults[place], answered.get(place))
            for place in range(len(rows))
        ]

    def _fault(self, call: ToolCall) -> str:
        """Return why a tool call can't be run, or an empty string if it can."""
        tool = next((tool for tool in self.pool.spec.tools if tool.name == call.name), None)
        if call.problem or tool is None:
            return (
                call.problem
                or f"there is no tool '{call.name}'; there are {listed(tool.name for tool in self.pool.spec.tools)}"
            )
        wrong = [name for name in call.arguments if name not in tool.parameters] + [
            n for n in tool.required if n not in call.arguments
        ]
        return f"{call.name} takes {listed(tool.parameters)}; look at '{wrong[0]}'" if wrong else ""

    def _results(
        self, row: _Row, calls: Sequence[ToolCall], faults: Sequence[str], answer: Answer | None
    ) -> Answer:
        if isinstance(answer, Failure):
            return answer
        results = iter(answer["results"] if answer else ())
        texts = [fault or next(results) for fault in faults]
        if calls:
            row.turns[-1]["calls"] = [[call.name, dict(call.arguments)] for call in calls]
        log = {"calls": float(len(calls)), "bad_calls": float(sum(map(bool, faults)))}
        return {
            "says": [{"role": "tool", "content": text} for text in texts],
            "reward": 0.0,
            "done": False,
            "log": log,
            **_changes(answer or {}),
        }

    def _continue_rows(
        self, rows: Sequence[_Row], answers: Sequence[Answer], stopped: Sequence[bool], turn: int
    ) -> None:
        """Decide which rows continue after the answers, and append the environment messages to those rows."""
        speaking, texts = [], []
        for row, answer, ended in zip(rows, answers, stopped, strict=True):
            if isinstance(answer, Failure):
                row.fail(answer)
                continue
            if answer["reward"]:
                row.pieces[-1] = replace(row.pieces[-1], reward=answer["reward"])
            told = {
                "reward": answer["reward"],
                "log": _sums(answer["log"], _sums(row.changed, _changes(answer))),
            }
            row.turns[-1] |= {name: value for name, value in told.items() if value}
            row.changed = {}
            says: EnvironmentText = answer["says"]
            if answer["done"] or not ended or not says or turn + 1 == self.pool.spec.bounds.turns:
                row.finish = (
                    "length" if not ended else "env" if answer["done"] else "turns" if says else "stop"
                )
                continue
            speaking.append(row)
            texts.append(says)
        self._append_messages(speaking, texts, [row.pieces[-1].tokens.tolist() for row in speaking])

    def _append_messages(
        self, rows: Sequence[_Row], texts: Sequence[EnvironmentText], sampled: Sequence[Sequence[int]]
    ) -> None:
        """Append the environment messages to the rows as masked-out tokens.

        If a message wouldn't leave room for another sampled token, the row ends without it.
        """
        if not rows:
            return
        for row, text, (ids, cut) in zip(rows, texts, self._ids(texts, sampled), strict=True):
            if cut and row.turns:
                row.turns[-1]["log"] = {**row.turns[-1].get("log", {}), "cut": 1.0}
            elif cut:
                row.changed["cut"] = 1.0
            if row.length + len(ids) >= self.sampling.max_tokens:
                row.finish = "length"
                continue
            if row.turns:
                row.turns[-1]["says"] = text
            masked = torch.tensor(ids, dtype=torch.int64)
            row.add(_Piece(masked, torch.zeros(len(ids)), torch.full((len(ids),), -1), -1, len(ids)))

    def _ids(
        self, texts: Sequence[EnvironmentText], sampled: Sequence[Sequence[int]]
    ) -> list[tuple[list[int], bool]]:
        """Return the token ids of each environment message, and whether it was cut to ``bounds.says`` tokens.

        A string is cut at its end. If there are several messages, the last one is shortened.
        """
        most = self.pool.spec.bounds.says
        heads = [cut_to(text, most * CHARACTERS) for text in texts]
        ids = self.speech.speak(heads, sampled)
        for place, text in enumerate(texts):
            if heads[place] is not text and len(ids[place]) < 2 * most:  # few tokens of many characters
                heads[place] = text
                (ids[place],) = self.speech.speak([text], [sampled[place]])
        long = [len(own) > most for own in ids]
        for place, text in enumerate(heads):
            shorter = text
            for _ in range(TRIES):
                if len(ids[place]) <= most or isinstance(shorter, str):
                    break
                shorter = self._shortened(shorter, len(ids[place]) - most)
                (ids[place],) = self.speech.speak([shorter], [sampled[place]])
            if isinstance(text, str):
                ids[place] = ids[place][:most]
        return list(zip(ids, long, strict=True))

    def _shortened(self, messages: list[Message], tokens: int) -> list[Message]:
        """Shorten the last of the messages by ``tokens`` tokens, and return them all."""
        content = self.speech.encode(messages[-1].get("content") or "")
        (text,) = self.speech.decode([content[: max(len(content) - tokens, 0)]])
        return [*messages[:-1], {**messages[-1], "content": text}]

    def _scored(self, rows: Sequence[_Row]) -> None:
        """End the episodes and store the scores returned by the environments."""
        ended = [row for row in rows if row.failure is None]
        for row, answer in zip(ended, self.pool.end([row.episode for row in ended]), strict=True):
            if isinstance(answer, Failure):
                row.fail(answer)
            elif (failure := Failure.of_sum(sum(piece.reward for piece in row.pieces))) is not None:
                row.fail(failure)
            else:
                row.score = answer.get("score")

    def _completions(self, rows: Sequence[_Row], first: Sequence[str]) -> list[str]:
        """Return the text of each row, including environment messages.

        For a row with a single turn, this is the generator's own text, taken from ``first``.
        """
        several = [place for place, row in enumerate(rows) if len(row.pieces) > 1]
        texts = dict(
            zip(
                several,
                self.speech.decode(
                    [torch.cat([piece.tokens for piece in rows[place].pieces]).tolist() for place in several]
                ),
                strict=True,
            )
        )
        return [texts.get(place, first[place]) for place in range(len(rows))]

    def _batch(self, axis: Axis, rows: Sequence[_Row], first: Batch, completions: Sequence[str]) -> Batch:
        pieces = [piece for row in rows for piece in row.pieces]
        lengths = torch.tensor([row.length for row in rows], dtype=torch.int64)
        sizes = torch.tensor([piece.size for piece in pieces], dtype=torch.int64)
        turn = torch.tensor([piece.turn for piece in pieces], dtype=torch.int64).repeat_interleave(sizes)
        logprobs = first.data["sampled_logprobs"].value
        rewards = torch.zeros(len(turn))
        sampled = torch.tensor([piece.turn >= 0 for piece in pieces], dtype=torch.bool)
        earned = [float("nan") if row.failure else piece.reward for row in rows for piece in row.pieces]
        rewards[(sizes.cumsum(0) - 1)[sampled]] = torch.tensor(earned)[sampled]
        token_level = {"mask": turn >= 0, "turn": turn, "turn_rewards": rewards}
        # each row has one uncut turn, so the sampled columns are used unchanged
        if len(logprobs) == len(turn) and len(pieces) == len(rows):
            token_level |= {
                name: first.data[name].value for name in ("tokens", "sampled_logprobs", "policy_version")
            }
        else:
            token_level |= {
                "tokens": _joined([piece.tokens for piece in pieces], torch.int64),
                "sampled_logprobs": _joined([piece.logprobs for piece in pieces], logprobs.dtype),
                "policy_version": _joined([piece.versions for piece in pieces], torch.int64),
            }
        data = {
            name: Data(Kind(Level.TOKEN, str(value.dtype).removeprefix("torch.")), value, lengths)
            for name, value in token_level.items()
        }
        texts = {
            "completion": completions,
            "finish": [row.finish for row in rows],
            "said": [row.text for row in rows],
            "failed": [row.failure.cause if row.failure else "" for row in rows],
            "episode": [_transcript(row) for row in rows],
        }
        data |= {name: Data(Kind(Level.TEXT), tuple(values)) for name, values in texts.items()}
        data["turns"] = Data(
            TABLE["turns"].kind, torch.tensor([len(row.turns) for row in rows], dtype=torch.int64)
        )
        data["episode_score"] = Data(TABLE["episode_score"].kind, torch.tensor([_score(row) for row in rows]))
        data["temperature"] = Data(first.data["temperature"].kind, first.data["temperature"].value)
        return Batch(axis, data | {"group": group_column(axis)})


def _row_values(prompts: Batch, pool: EnvironmentPool) -> list[dict[str, Any]]:
    """For each prompt, return the values that the environment's ``reset`` reads, by column name.

    Fields that come from the data are JSON strings.
    """
    columns = {name: prompts[name] for name in read_columns(prompts.data, pool)}
    plain = {
        name: list(values) if isinstance(values, list) else values.tolist()
        for name, values in columns.items()
    }
    return [{name: values[row] for name, values in plain.items()} for row in range(len(prompts))]


def _changes(answer: Mapping[str, Any]) -> dict[str, float]:
    """Return, by name, how many changes of each kind were made to an answer before the model reads it."""
    return {name: answer[name] for name in CHANGES if name in answer}


def _sums(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {**one, **{name: one.get(name, 0.0) + value for name, value in other.items()}}


def _score(row: _Row) -> float:
    if row.failure is not None:
        return float("nan")
    return row.score if row.score is not None else sum(piece.reward for piece in row.pieces)


def _transcript(row: _Row) -> str:
    """Return the messages of all turns of an episode, as JSON."""
    failed = {"failed": f"{row.failure.cause}: {row.failure.reason}"} if row.failure else {}
    return json.dumps(
        {**({"reset": row.opening} if row.opening else {}), "turns": row.turns, **failed}, ensure_ascii=False
    )


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([part.to(dtype) for part in parts]) if parts else torch.zeros(0, dtype=dtype)


def read_columns(columns: Mapping[str, Any], pool: EnvironmentPool) -> tuple[str, ...]:
    """Return the columns that the environments read."""
    source = pool.spec.source
    names = [*source.required, *source.optional, *(REST if source.rest else ())]
    fields = [name for name in columns if source.rest and name.startswith(field_column(""))]
    return tuple(
        dict.fromkeys(
            [name for each in names for name in (each, field_column(each)) if name in columns] + fields
        )
    )
