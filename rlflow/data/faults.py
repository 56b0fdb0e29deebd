"""Finds records that can't be used, and reports why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlflow.author.messages import Message
from rlflow.data.encode import Encoder, Wording
from rlflow.data.fields import Record
from rlflow.data.turns import answered, joined
from rlflow.errors import Place, PlanError, Problem

Cause = Literal["unreadable", "empty", "wording", "too_long"]
CAUSES: Mapping[Cause, str] = {  # cause → description, in the order of messages
    "unreadable": "unreadable",
    "empty": "without a prompt",
    "wording": "refused by the tokenizer or its chat template",
    "too_long": "too long",
}
CHARACTERS = 2**20  # maximum number of characters in records that are encoded at once
SHOWN = 3  # maximum faults that an error describes in full
PLACES = 8  # maximum number of places that a message lists for each cause


@dataclass(frozen=True)
class Room:
    """The most tokens that a model accepts, with None for no limit."""

    prompt: int | None = None  # maximum number of tokens in a prompt
    row: int | None = None  # maximum number of tokens in a prompt and its response together
    why: str = ""  # where the limits come from, as the end of a message

    def __str__(self) -> str:
        limits = {"a prompt": self.prompt, "a prompt and its response": self.row}
        return (
            ", ".join(
                f"at most {limit} tokens of {subject}"
                for subject, limit in limits.items()
                if limit is not None
            )
            + self.why
        )


@dataclass(frozen=True)
class Fault:
    """Why a record can't be used."""

    cause: Cause
    problem: Problem
    tokens: int = 0  # for a record that is too long: a lower bound of its tokens; else 0

    @property
    def place(self) -> Place | None:
        """The record's file and line, or None if it wasn't read from a file."""
        return self.problem.place

    def __str__(self) -> str:
        return f"{self.place or 'a record'} is skipped: {self.problem.message}"


def faults(
    records: Sequence[Record], index: Sequence[int], encoder: Encoder, wording: Wording, room: Room, name: str
) -> dict[int, Fault]:
    """Check the records at the indices ``index``. Return the faults of those that are unusable, by index.

    Many records are encoded in one call, and one by one only if that call fails. ``room``: the token limits.
    ``name``: what to call the data set in messages.
    """
    checker = _Checker(encoder, wording, room, name)
    by_record: dict[int, Fault] = {}
    for part in _parts(records, index):
        if not checker.all_sound([records[i] for i in part]):
            by_record |= {i: fault for i in part if (fault := checker(records[i], i)) is not None}
    return by_record


def lengths(
    records: Sequence[Record], encoder: Encoder, wording: Wording, room: Room, name: str
) -> Iterator[tuple[int, int]]:
    """For each usable record, yield (tokens of the prompt, tokens of the prompt with its longest response).

    Takes the same arguments as ``faults``.
    """
    checker = _Checker(encoder, wording, room, name)
    for part in _parts(records, range(len(records))):
        sound = [records[i] for i in part]
        if not checker.all_sound(sound):
            sound = [records[i] for i in part if checker(records[i], i) is None]
        yield from checker.lengths(sound)


def _parts(records: Sequence[Record], index: Sequence[int]) -> Iterator[list[int]]:
    """Split the indices into parts of up to CHARACTERS characters. A longer record gets its own part."""
    part: list[int] = []
    size = 0
    for i in index:
        length = _characters(records[i])
        if part and size + length > CHARACTERS:
            yield part
            part, size = [], 0
        part.append(i)
        size += length
    if part:
        yield part


def _characters(record: Record) -> int:
    return sum(map(_length, (record.prompt, *record.responses)))


def _over(count: int, limit: int | None) -> bool:
    return limit is not None and count > limit


def _length(text: str | Sequence[Message]) -> int:
    return len(text) if isinstance(text, str) else sum(len(message.get("content") or "") for message in text)


@dataclass(frozen=True)
class _Checker:
    """Finds the fault of a record, for one data set and one model."""

    encoder: Encoder
    wording: Wording
    room: Room
    name: str

    def all_sound(self, records: Sequence[Record]) -> bool:
        """True if all records are certainly usable.

        If False, they may still be usable, and must be checked one by one.
        """
        if any(self._empty(record) or self._surely_longer(record) for record in records):
            return False
        try:
            return all(self._fits(prompt, longest) for prompt, longest in self.lengths(records))
        except PlanError:
            return False

    def __call__(self, record: Record, number: int) -> Fault | None:
        if self._empty(record):
            return self._fault(record, number, "empty", "its prompt is empty", "an empty text", "a question")
        if least := self._surely_longer(record):
            return self._too_long(record, number, least, f"a text of {_characters(record)} characters")
        try:
            prompt, longest = self.lengths([record])[0]
        except PlanError as error:
            first = error.problems[0]
            return Fault(
                "wording",
                replace(first, place=record.place, message=f"{self._which(record, number)}{first.message}"),
            )
        if not prompt:
            return self._fault(
                record,
                number,
                "empty",
                "its prompt has no tokens",
                repr(record.question[:60]),
                "one token or more",
            )
        if self._fits(prompt, longest):
            return None
        return self._too_long(
            record,
            number,
            longest,
            f"a prompt of {prompt} tokens" + (" and its response" if record.responses else ""),
        )

    def _empty(self, record: Record) -> bool:
        """True if a record has neither a question nor responses."""
        return not record.responses and not record.question.strip()

    def lengths(self, records: Sequence[Record]) -> list[tuple[int, int]]:
        """Return (tokens of the prompt, tokens of the prompt with its longest response) for each record."""
        wordings = [self.wording.of(record) for record in records]
        turns = iter(
            answered(
                self.encoder,
                [
                    (wording, response)
                    for record, wording in zip(records, wordings, strict=True)
                    for response in record.responses
                ],
            )
        )
        lengths = []
        for record, prompt in zip(records, self.encoder.prompts(wordings), strict=True):
            rows = [joined(next(turns))[0] for _ in record.responses]
            lengths.append((len(prompt), len(prompt) + max(map(len, rows), default=0)))
        return lengths

    def _fits(self, prompt: int, longest: int) -> bool:
        """True if the prompt has tokens, and both lengths are within the limits.

        ``longest``: tokens of the prompt with its longest response.
        """
        return prompt > 0 and not _over(prompt, self.room.prompt) and not _over(longest, self.room.row)

    def _surely_longer(self, record: Record) -> int:
        """Return a lower bound of the record's tokens if it exceeds a limit, or 0.

        The bound follows from the number of characters and the tokenizer's longest token.
        """
        prompt = _length(record.prompt)
        row = prompt + max((_length(response) for response in record.responses), default=0)
        if not _over(prompt, self.room.prompt) and not _over(row, self.room.row):
            return 0
        prompt, row = (-(-characters // self.encoder.longest) for characters in (prompt, row))
        return row if _over(prompt, self.room.prompt) or _over(row, self.room.row) else 0

    def _too_long(self, record: Record, number: int, tokens: int, finding: str) -> Fault:
        fault = self._fault(
            record, number, "too_long", f"it is too long ({tokens} tokens)", finding, str(self.room)
        )
        return replace(fault, tokens=tokens)

    def _fault(
        self, record: Record, number: int, cause: Cause, message: str, finding: str, expected: str
    ) -> Fault:
        which = self._which(record, number)
        return Fault(
            cause, Problem("data-record", f"{which}{message}", record.place, found=finding, expected=expected)
        )

    def _which(self, record: Record, number: int) -> str:
        """Return "record … of …: " for messages about a record without a place, or an empty string."""
        return "" if record.place else f"record {number + 1} of {self.name}: "


def counted(faults: Iterable[Fault]) -> dict[Cause, list[Fault]]:
    """Group faults by cause, in the order of CAUSES."""
    faults = list(faults)
    return {
        cause: of_cause
        for cause in CAUSES
        if (of_cause := [fault for fault in faults if fault.cause == cause])
    }


def spoken(faults: Iterable[Fault]) -> str:
    """Summarize faults in one line: for each cause, how many records, where, and the longest length."""
    return "; ".join(_cause_summary(cause, of_cause) for cause, of_cause in counted(faults).items())


def _cause_summary(cause: Cause, of_cause: Sequence[Fault]) -> str:
    longest = (
        f", the longest of {max(fault.tokens for fault in of_cause)} tokens" if cause == "too_long" else ""
    )
    return f"{len(of_cause)} {CAUSES[cause]}{longest}{places_of([fault.place for fault in of_cause])}"


def places_of(places: Iterable[Place | None]) -> str:
    """Return the first PLACES places as " (…)", or an empty string if no record has a place."""
    known = [str(place) for place in places if place]
    ellipsis = ", …" if len(known) > PLACES else ""
    return f" ({', '.join(_short(known[:PLACES]))}{ellipsis})" if known else ""


def _short(places: Sequence[str]) -> Iterator[str]:
    """Shorten places in the same file to their line numbers, except for the first one."""
    before = ""
    for place in places:
        path, _, line = place.rpartition(":")
        yield f":{line}" if path == before else place
        before = path


def refused(name: str, faults: Sequence[Fault], checked: int, room: Room) -> PlanError:
    """Return the error for data with unusable records: the first few faults in full, then a summary.

    ``checked``: how many records were checked. ``room``: the token limits.
    """
    too_long = any(fault.cause == "too_long" for fault in faults)
    shorter = f", --data.max_prompt {room.prompt} drops longer prompts" if too_long and room.prompt else ""
    by_message: dict[str, Problem] = {}
    for fault in faults:
        by_message.setdefault(fault.problem.message, fault.problem)
    summary = Problem(
        "data-records",
        f"{len(faults)} of {checked} records of {name} cannot be used",
        found=spoken(faults),
        expected=str(room) if too_long else "records that every model of the run can read",
        remedy=f"correct them; or --bad-records skip drops and counts them{shorter}",
    )
    return PlanError(*[*by_message.values()][:SHOWN], summary)
