"""Dataset: records of one shape, how they are worded for a model, and the split that keeps held-out questions
out of training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from rlflow.author.columns import SOURCE, Kind
from rlflow.data import rows
from rlflow.data.encode import Encoder, TokenizerEncoder, Wording
from rlflow.data.faults import Fault, Room, faults, lengths
from rlflow.data.fields import FIELDS, OF_PROJECTS, Record, Shape
from rlflow.data.scorer import MATCH, DataShape, ScorerSpec
from rlflow.errors import PlanError, Problem

if TYPE_CHECKING:
    from rlflow.author.batch import Batch


@dataclass(frozen=True, eq=False)
class Dataset:
    """Records and what turns them into rows. ``len`` counts records; a pair is one record and two rows."""

    name: str
    records: Sequence[Record]
    encoder: Encoder
    wording: Wording = Wording()
    declared: Mapping[str, Kind] = field(default_factory=dict)  # columns beyond the standard ones
    task: ScorerSpec | None = None
    # the field of the file that each name was read from
    fields: Mapping[str, str] = field(default_factory=dict)
    dropped: int = 0  # records left out because their prompt is longer than ``max_prompt``
    doubles: int = 0  # questions that a task drew again
    # records of the file that could not be read, so that they are none of ``records``
    faults: tuple[Fault, ...] = ()
    room: Room = Room()  # what models can take of a row
    alone: int = 0  # prompts of one message that are plain text, since the tokenizer has no chat template
    unread: tuple[str, ...] = ()  # fields of the file that no column is read from
    # of several sources, each by its name, as it was opened
    parts: Mapping[str, Dataset] = field(default_factory=dict)
    numbered: bool = False  # whether rows have the column prompt_id
    model_prompt: bool = False  # whether rows have the column MODEL_PROMPT
    # of several sources: shares of the prompts, of any sum above 0
    weights: Mapping[str, Fraction] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        left_out = "".join(
            f"; {count} {why}"
            for why, count in (("too long", self.dropped), ("drawn twice", self.doubles))
            if count
        )
        return f"Dataset({self.name}: {len(self)} {self.shape}{left_out})"

    @property
    def worded(self) -> str:
        """A text that says how prompts go through the chat template, or that messages do not; empty for plain
        text."""
        folder = getattr(self.encoder, "folder", "")
        if self.alone:
            return (
                f"prompts of one message are plain text, since the tokenizer of {folder} has no chat template"
            )
        variables = "".join(
            f", {name} = {json.dumps(value)}" for name, value in self.wording.template_kwargs.items()
        )
        through = f"prompts go through the chat template of {folder}{variables}"
        return f"{through} (--data.chat false for plain text)" if self.wording.chat else ""

    def templated(self, called: str = "") -> Problem | None:
        """The warning that prompts which go through the chat template hold control tokens already, as those
        do that were worded before; None where none does. ``called``: what the warning calls the data, in
        place of their name."""
        if not isinstance(self.encoder, TokenizerEncoder) or not self.encoder.chats:
            return None
        finds = self.encoder.controls.pattern.search
        worded = [
            record for record in self.records if self.wording.chat or not isinstance(record.prompt, str)
        ]
        held = [(record, match[0]) for record in worded if (match := finds(record.question)) is not None]
        if not held:
            return None
        record, token = held[0]
        return Problem(
            "data-controls",
            f"{len(held)} of {len(worded)} prompts of {called or self.name} hold control tokens already",
            record.place,
            found=f"{token} in {record.question[:60]!r}",
            expected="a question, which the template words",
            remedy="--data.chat false for prompts that are worded already; nothing, if they mean to "
            "speak as a turn",
            severity="warning",
        )

    @property
    def recognised(self) -> str:
        """A text that says which project's records these are, and what they are read as; empty where they are
        rlflow's own."""
        if self.parts:
            return "\n".join(filter(None, (part.recognised for part in self.parts.values())))
        project = next((OF_PROJECTS[field] for field in self.fields.values() if field in OF_PROJECTS), "")
        columns = ", ".join(f"{name} from '{field}'" for name, field in self.fields.items() if name in FIELDS)
        return (
            f"{self.name} has records as {project} has them: {columns} (--data.NAME FIELD for others)"
            if project
            else ""
        )

    @property
    def shape(self) -> Shape:
        """Whether the records are prompts alone, prompts with completions, or pairs of responses."""
        return ("prompts", "completions", "pairs")[len(self._like.responses)]

    @property
    def _like(self) -> Record:
        """A record that stands for all, since they are of one shape; with an answer where one of several
        sources has answers."""
        like = self.records[0] if self.records else Record("")
        return (
            replace(like, answer="")
            if any("answer" in part.columns for part in self.parts.values())
            else like
        )

    @property
    def columns(self) -> dict[str, Kind]:
        """Name → kind of the columns that the data set's rows have."""
        return rows.kinds(self._like, self.declared, self.model_prompt)

    @property
    def scorer(self) -> ScorerSpec | None:
        """The scorer of the reward ``task``: the reasoning-gym task's own, else a comparison with the answer;
        None where there is neither, and where there are several sources, each of which has its own."""
        if self.parts:
            return None
        return self.task or (MATCH if "answer" in self.columns else None)

    @property
    def sources(self) -> dict[str, DataShape]:
        """Facts that rewards need of each of several sources, by its name."""
        return {name: DataShape(part.columns, part.scorer) for name, part in self.parts.items()}

    @property
    def known(self) -> tuple[str, ...]:
        """Names of the fields of its file, as the first record has them: those that are read, and the
        others."""
        return tuple(dict.fromkeys([*self.fields.values(), *self.unread]))

    @cached_property
    def digest(self) -> str:
        """12 hex digits of a SHA-256 over all records in order, by which a resumed run notices that its data
        have changed."""
        total = hashlib.sha256()
        for record in self.records:
            total.update(
                json.dumps(
                    [record.prompt, record.answer, record.responses, dict(record.more)], default=str
                ).encode()
            )
        return total.hexdigest()[:12]

    def batch(self, index: Sequence[int], start: int = 0, at: Sequence[int] | None = None) -> Batch:
        """The records at ``index`` as rows. ``at``: the position of each in the data stream; without it they
        are consecutive from ``start``."""
        positions = range(start, start + len(index)) if at is None else at
        return rows.batch(
            [self.records[i] for i in index],
            self._like,
            positions,
            self.encoder,
            self.wording,
            self.declared,
            self.numbered,
            self.model_prompt,
        )

    def faulty(self, index: Sequence[int]) -> dict[int, Fault]:
        """Record → what is wrong with it, for those of the records at ``index`` that cannot be given to a
        model."""
        return faults(self.records, index, self.encoder, self.wording, self.room, self.name)

    def longest(self) -> tuple[int, int]:
        """Tokens of the longest prompt, and of the longest prompt with its response, of all records that can
        be given to a model."""
        every = list(lengths(self.records, self.encoder, self.wording, self.room, self.name))
        return max((prompt for prompt, _ in every), default=0), max((row for _, row in every), default=0)

    def within(self, room: Room) -> Dataset:
        """The data set, with records judged by the room that a model has for a row."""
        return replace(self, room=room)

    def usable(self) -> Iterator[int]:
        """The indices of records that can be given to a model, in order."""
        return (i for i in range(len(self)) if not self.faulty([i]))

    def split(self, held_out: int | float | Mapping[str, int], seed: int = 0) -> tuple[Dataset, Dataset]:
        """(training, held-out) data sets, disjoint by the text of the question. ``held_out``: a share below
        1, a count of questions, or such a count for each of several sources; a question that one source holds
        out is held out of all.

        Records of one question go to one side, decided by a hash of its text and ``seed``. With a share
        (0.05) a question is on the same side in any data set; with a count, the questions of lowest hash are
        held out, and a few more records than asked for where the last question has several. Repeated
        questions are kept. Raises PlanError where one side would be empty.
        """
        if not held_out or not self.records:
            return self, replace(self, records=(), dropped=0, doubles=0, faults=())
        places = [_place(record.question, seed) for record in self.records]
        if isinstance(held_out, Mapping):
            questions = self._held_out_by_source(places, held_out)
            is_held_out = [place in questions for place in places]
        else:
            is_held_out = _held_out(places, held_out)
        if all(is_held_out) or (not isinstance(held_out, Mapping) and held_out < 0):
            raise _bad_split(self, held_out)
        sides = [
            [record for record, out in zip(self.records, is_held_out, strict=True) if out is side]
            for side in (False, True)
        ]
        return replace(self, records=sides[0]), replace(
            self, records=sides[1], dropped=0, doubles=0, faults=()
        )

    def _held_out_by_source(self, places: Sequence[int], counts: Mapping[str, int]) -> set[int]:
        """The places of questions that are held out, so many of each source."""
        held_out: set[int] = set()
        for name, count in counts.items():
            own = [
                place
                for place, record in zip(places, self.records, strict=True)
                if record.more[SOURCE] == name
            ]
            held_out |= (
                {place for place, out in zip(own, _held_out(own, count), strict=True) if out}
                if count
                else set()
            )
        return held_out


def _place(question: str, seed: int) -> int:
    """A hash of the question's words and the seed, from 0 to 2**64 - 1. Spaces and the place in the file do
    not matter."""
    digest = hashlib.sha256(f"{seed}\n{' '.join(question.split())}".encode()).digest()
    return int.from_bytes(digest[:8])


def _held_out(places: Sequence[int], held_out: int | float) -> list[bool]:
    """Decide for each record whether it is held out. At least one is."""
    ordered = sorted(places)
    by_count = isinstance(held_out, int)
    limit = (
        ordered[min(int(held_out), len(ordered)) - 1] if by_count else max(int(held_out * 2**64), ordered[0])
    )
    return [place <= limit for place in places]


def _bad_split(data: Dataset, held_out: int | float | Mapping[str, int]) -> PlanError:
    questions = len({record.question for record in data.records})
    return PlanError.of(
        "held-out",
        "nothing would be left to train on, or nothing held out",
        found=f"{held_out} held out of {questions} questions in {data.name}",
        expected="a share between 0 and 1, or a count below the number of questions",
    )
