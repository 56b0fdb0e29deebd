"""Records of one shape, and the settings that turn them into rows.

A data set can split its records into training and held-out questions.
"""

from __future__ import annotations

import hashlib
import json
from array import array
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
from rlflow.data.stored import picked
from rlflow.errors import PlanError, Problem

if TYPE_CHECKING:
    from rlflow.author.batch import Batch


@dataclass(frozen=True, eq=False)
class Dataset:
    """Records, and the settings that turn them into rows.

    ``len(data)`` is the number of records. A preference pair is one record and two rows.
    """

    name: str
    records: Sequence[Record]
    encoder: Encoder
    wording: Wording = Wording()
    declared: Mapping[str, Kind] = field(default_factory=dict)  # columns in addition to the standard columns
    task: ScorerSpec | None = None
    # Name → its field in the file.
    fields: Mapping[str, str] = field(default_factory=dict)
    dropped: int = 0  # records dropped because their prompt is longer than ``max_prompt``
    doubles: int = 0  # dropped repetitions of questions that a task drew more than once
    # Faults of unreadable records in the file; these records are not in ``records``.
    faults: tuple[Fault, ...] = ()
    room: Room = Room()  # the longest prompt and row that the models accept
    # prompts of a single message that are used as plain text because the tokenizer has no chat template
    alone: int = 0
    unread: tuple[str, ...] = ()  # fields of the file that are not used for any column
    # Name → data set of each source, as opened; empty for a single source.
    parts: Mapping[str, Dataset] = field(default_factory=dict)
    numbered: bool = False  # True if rows have the column prompt_id
    model_prompt: bool = False  # True if rows have the column MODEL_PROMPT
    # Name → share of the prompts, if there are several sources; the shares may have any positive sum.
    weights: Mapping[str, Fraction] = field(default_factory=dict)
    commit: str = ""  # of the repository on the Hub that the records come from
    splits: tuple[str, ...] = ()  # names of all splits of the source; empty if it has none
    split_read: str = ""  # the split that ``records`` come from
    test: Sequence[Record] = ()  # records of the split "test", which are held out

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
        """Return a sentence that says whether prompts go through the chat template.

        If the tokenizer has no template, it says that prompts of a single message are used as plain text.
        Empty if all prompts are plain text.
        """
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
        """Return a warning if prompts for the chat template already contain control tokens, or None.

        Most likely, such prompts were formatted by a template before. ``called``: what to call the data in
        the warning; by default, the data set's ``name``.
        """
        if not isinstance(self.encoder, TokenizerEncoder) or not self.encoder.chats:
            return None
        finds = self.encoder.controls.pattern.search
        worded = affected = 0
        first: tuple[Record, str] | None = None
        for record in self.records:
            if self.wording.chat or not isinstance(record.prompt, str):
                worded += 1
                if (match := finds(record.question)) is not None:
                    affected += 1
                    first = first or (record, match[0])
        if first is None:
            return None
        record, token = first
        return Problem(
            "data-controls",
            f"{affected} of {worded} prompts of {called or self.name} already contain control tokens",
            record.place,
            found=f"{token} in {record.question[:60]!r}",
            expected="a question, which the template formats",
            remedy="--data.chat false for prompts that are already formatted; nothing, if the tokens "
            "are part of the question's text",
            severity="warning",
        )

    @property
    def recognised(self) -> str:
        """Return a sentence that says whose field names the records use, and how those fields are mapped.

        Empty if they use rlflow's own names.
        """
        if self.parts:
            return "\n".join(filter(None, (part.recognised for part in self.parts.values())))
        project = next((OF_PROJECTS[field] for field in self.fields.values() if field in OF_PROJECTS), "")
        columns = ", ".join(f"{name} from '{field}'" for name, field in self.fields.items() if name in FIELDS)
        return (
            f"{self.name} uses the field names of {project}: {columns} (--data.NAME FIELD for others)"
            if project
            else ""
        )

    @property
    def split_lines(self) -> str:
        """Describe the data's splits and how they are used. Empty if there is at most one."""
        if self.parts:
            return "\n".join(filter(None, (part.split_lines for part in self.parts.values())))
        if len(self.splits) < 2:
            return ""
        held_out = (
            f"holds out questions of 'test' ({len(self.test)})" if self.test else "holds out a part of it"
        )
        return (
            f"{self.name} has the splits {', '.join(self.splits)}: the run trains on '{self.split_read}' "
            f"({len(self)} records) and {held_out} (--data.split NAME reads one split)"
        )

    @property
    def shape(self) -> Shape:
        """What each record has: "prompts", "completions" (prompt and completion) or "pairs" (two responses)."""
        return ("prompts", "completions", "pairs")[len(self._like.responses)]

    @property
    def _like(self) -> Record:
        """A record with the same columns as the data set. It has an answer if any source has answers."""
        like = self.records[0] if self.records else Record("")
        return (
            replace(like, answer="")
            if any("answer" in part.columns for part in self.parts.values())
            else like
        )

    @property
    def columns(self) -> dict[str, Kind]:
        """The kind of each column of the data set's rows, by name."""
        return rows.kinds(self._like, self.declared, self.model_prompt)

    @property
    def scorer(self) -> ScorerSpec | None:
        """The scorer for ``--reward task``, or None if the data has none.

        A reasoning-gym task has its own scorer. Other data with answers gets one that compares with the
        answer. With several sources, this is None, because each source has its own scorer.
        """
        if self.parts:
            return None
        return self.task or (MATCH if "answer" in self.columns else None)

    @property
    def sources(self) -> dict[str, DataShape]:
        """The columns and scorer of each source, by source name. Empty if there is only one source."""
        return {name: DataShape(part.columns, part.scorer) for name, part in self.parts.items()}

    @property
    def known(self) -> tuple[str, ...]:
        """The names of all fields in the file's first record, even unused ones."""
        return tuple(dict.fromkeys([*self.fields.values(), *self.unread]))

    @cached_property
    def digest(self) -> str:
        """First 12 hex digits of a SHA-256 over all records in order.

        A resumed run uses it to detect changed data.
        """
        total = hashlib.sha256()
        for record in self.records:
            total.update(
                json.dumps(
                    [record.prompt, record.answer, record.responses, dict(record.more)], default=str
                ).encode()
            )
        return total.hexdigest()[:12]

    def batch(self, index: Sequence[int], start: int = 0, at: Sequence[int] | None = None) -> Batch:
        """Return the records with the indices ``index`` as rows.

        ``at``: each record's position in the data stream; by default, positions count up from ``start``.
        """
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
        """Check the records at the indices ``index``. Return the faults of unusable ones, by index."""
        return faults(self.records, index, self.encoder, self.wording, self.room, self.name)

    def longest(self) -> tuple[int, int]:
        """Return (tokens of the longest prompt, tokens of the longest prompt with its response).

        Unusable records aren't counted.
        """
        every = list(lengths(self.records, self.encoder, self.wording, self.room, self.name))
        return max((prompt for prompt, _ in every), default=0), max((row for _, row in every), default=0)

    def within(self, room: Room) -> Dataset:
        """Return the data set with ``room`` as the limit on the tokens of prompts and rows."""
        return replace(self, room=room)

    def usable(self) -> Iterator[int]:
        """Yield the indices of the usable records in ascending order."""
        return (i for i in range(len(self)) if not self.faulty([i]))

    def split(self, held_out: float | Mapping[str, int], seed: int = 0) -> tuple[Dataset, Dataset]:
        """Return (training, held-out) data sets that share no question.

        ``held_out``: a share below 1, a number of questions, or a number of questions for each source, by
        name. No source trains on a question that another one holds out.

        The choice depends on a hash of the question's text and ``seed``, so all records of a question end up
        in the same set. With a share such as 0.05, adding or removing records never moves a question to the
        other set. With a number, the questions with the lowest hashes are held out; if questions repeat, the
        held-out set can be a few records larger than requested. Raises PlanError if either set would be
        empty.
        """
        if not held_out or not self.records:
            return replace(self, test=()), replace(self, records=(), test=(), dropped=0, doubles=0, faults=())
        if self.test:
            return self._with_test(held_out, seed)
        places = array("Q", (_place(record.question, seed) for record in self.records))
        if isinstance(held_out, Mapping):
            questions = self._held_out_by_source(places, held_out)
            is_held_out = [place in questions for place in places]
        else:
            is_held_out = _held_out(places, held_out)
        if all(is_held_out) or (not isinstance(held_out, Mapping) and held_out < 0):
            raise _bad_split(self, held_out)
        sides = [
            picked(self.records, (i for i, out in enumerate(is_held_out) if out is side))
            for side in (False, True)
        ]
        return replace(self, records=sides[0]), replace(
            self, records=sides[1], dropped=0, doubles=0, faults=()
        )

    def _with_test(self, held_out: float | Mapping[str, int], seed: int) -> tuple[Dataset, Dataset]:
        """Split as ``split`` does, but hold out records of the split "test" for sources that have one.

        A held-out question is removed from the training data, even if the split "train" has it too.
        """
        places = [_place(record.question, seed) for record in self.test]
        if isinstance(held_out, Mapping):
            with_test = {record.more[SOURCE] for record in self.test}
            own = {name: count for name, count in held_out.items() if name in with_test}
            tests = replace(self, records=self.test, test=())
            questions = tests._held_out_by_source(places, own)
            others = {name: count for name, count in held_out.items() if name not in with_test}
            training, rest = replace(self, test=()).split(others, seed)
        else:
            outs = _held_out(places, held_out)
            questions = {place for place, out in zip(places, outs, strict=True) if out}
            training, rest = replace(self, test=()).split(0)
        held = [record for record, place in zip(self.test, places, strict=True) if place in questions]
        kept = picked(
            training.records,
            (
                i
                for i, record in enumerate(training.records)
                if _place(record.question, seed) not in questions
            ),
        )
        if not kept:
            raise _bad_split(self, held_out)
        return replace(training, records=kept), replace(rest, records=[*rest.records, *held])

    def _held_out_by_source(self, places: Sequence[int], counts: Mapping[str, int]) -> set[int]:
        """Choose the questions to hold out from each source, and return their hashes.

        ``places``: the hash of each record's question. ``counts``: how many questions to choose, by source.
        """
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
    """Return a hash of the question's words and the seed, from 0 to 2**64 - 1.

    The hash does not depend on white space, or on the question's place in the file.
    """
    digest = hashlib.sha256(f"{seed}\n{' '.join(question.split())}".encode()).digest()
    return int.from_bytes(digest[:8])


def _held_out(places: Sequence[int], held_out: float) -> list[bool]:
    """For each record, return whether it's held out. At least one record is.

    ``places``: the hash of each record's question. ``held_out``: a number of records, or a share (float).
    """
    ordered = sorted(places)
    by_count = isinstance(held_out, int)
    limit = (
        ordered[min(int(held_out), len(ordered)) - 1] if by_count else max(int(held_out * 2**64), ordered[0])
    )
    return [place <= limit for place in places]


def _bad_split(data: Dataset, held_out: float | Mapping[str, int]) -> PlanError:
    questions = len({record.question for record in data.records})
    return PlanError.of(
        "held-out",
        "either nothing would be left to train on, or nothing would be held out",
        found=f"{held_out} held out of {questions} questions in {data.name}",
        expected="a share between 0 and 1, or a count below the number of questions",
        remedy="hold out fewer questions (--held-out), or use more data",
    )
