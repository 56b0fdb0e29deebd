"""Records that cannot be used: which, why, and how that is said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlflow.data.encode import Encoder, Wording
from rlflow.data.fields import Message, Record
from rlflow.data.turns import joined
from rlflow.errors import Place, PlanError, Problem

Cause = Literal["unreadable", "empty", "wording", "too_long"]
CAUSES: Mapping[Cause, str] = {  # in the order in which they are told
    "unreadable": "unreadable", "empty": "without a prompt", "wording": "refused by the tokenizer or its chat template",
    "too_long": "too long",
}
CHARACTERS = 2**20  # of the records that are encoded at once
SHOWN = 3  # faults that are told in full
PLACES = 8  # places that are named of each cause


@dataclass(frozen=True)
class Room:
    """Tokens that a prompt may have at most, and that a row of the data may have, prompt and response together; None where there is no
    limit. why: where the limits come from."""

    prompt: int | None = None
    row: int | None = None
    why: str = ""

    def __str__(self) -> str:
        limits = {"a prompt": self.prompt, "a prompt and its response": self.row}
        return ", ".join(f"at most {limit} tokens of {what}" for what, limit in limits.items() if limit is not None) + self.why


@dataclass(frozen=True)
class Fault:
    """What is wrong with a record. ``tokens``: of one that is too long its length, at least."""

    cause: Cause
    problem: Problem
    tokens: int = 0

    @property
    def place(self) -> Place | None:
        return self.problem.place

    def __str__(self) -> str:
        return f"{self.place or 'a record'} is left out: {self.problem.message}"


def faults(
    records: Sequence[Record], index: Sequence[int], encoder: Encoder, wording: Wording, room: Room, name: str
) -> dict[int, Fault]:
    """Those of the records at ``index`` that no model can be given. All are encoded at once where that goes well."""
    judge = _Judge(encoder, wording, room, name)
    found: dict[int, Fault] = {}
    for part in _parts(records, index):
        if not judge.all_sound([records[i] for i in part]):
            found |= {i: fault for i in part if (fault := judge(records[i], i)) is not None}
    return found


def _parts(records: Sequence[Record], index: Sequence[int]) -> Iterator[list[int]]:
    """Records whose texts together are not too long to be encoded at once, or one that is."""
    part: list[int] = []
    size = 0
    for i in index:
        own = _characters(records[i])
        if part and size + own > CHARACTERS:
            yield part
            part, size = [], 0
        part.append(i)
        size += own
    if part:
        yield part


def _characters(record: Record) -> int:
    return sum(map(_length, (record.prompt, *record.responses)))


def _over(count: int, limit: int | None) -> bool:
    return limit is not None and count > limit


def _length(said: str | Sequence[Message]) -> int:
    return len(said) if isinstance(said, str) else sum(len(message["content"]) for message in said)


@dataclass(frozen=True)
class _Judge:
    """Says of a record what is wrong with it."""

    encoder: Encoder
    wording: Wording
    room: Room
    name: str

    def all_sound(self, records: Sequence[Record]) -> bool:
        """Whether nothing is wrong with any; False where that is not known so quickly."""
        if any(self._empty(record) or self._surely_longer(record) for record in records):
            return False
        try:
            return all(self._fits(prompt, longest) for prompt, longest in self._lengths(records))
        except PlanError:
            return False

    def __call__(self, record: Record, number: int) -> Fault | None:
        if self._empty(record):
            return self._fault(record, number, "empty", "its prompt is empty", "an empty text", "a question")
        if least := self._surely_longer(record):
            return self._too_long(record, number, least, f"a text of {_characters(record)} characters")
        try:
            prompt, longest = self._lengths([record])[0]
        except PlanError as error:
            first = error.problems[0]
            return Fault("wording", replace(first, place=record.place, message=f"{self._which(record, number)}{first.message}"))
        if not prompt:
            return self._fault(record, number, "empty", "its prompt has no tokens", repr(record.question[:60]), "one token or more")
        if self._fits(prompt, longest):
            return None
        return self._too_long(record, number, longest, f"a prompt of {prompt} tokens" + (" and its response" if record.responses else ""))

    def _empty(self, record: Record) -> bool:
        """Whether a record asks nothing. One with responses may begin with nothing but the tokenizer's first token."""
        return not record.responses and not record.question.strip()

    def _lengths(self, records: Sequence[Record]) -> list[tuple[int, int]]:
        """Of each record the tokens of its prompt, and of it with its longest response."""
        worded = [self.wording.of(record) for record in records]
        texts = iter(self.encoder.responses([said for record in records for said in record.responses if isinstance(said, str)]))
        found = []
        for record, ask, prompt in zip(records, worded, self.encoder.prompts(worded), strict=True):
            rows = [next(texts) if isinstance(said, str) else joined(self.encoder.turns(ask, said))[0] for said in record.responses]
            found.append((len(prompt), len(prompt) + max(map(len, rows), default=0)))
        return found

    def _fits(self, prompt: int, longest: int) -> bool:
        """Whether there is a prompt, and room for it and its longest response."""
        return prompt > 0 and not _over(prompt, self.room.prompt) and not _over(longest, self.room.row)

    def _surely_longer(self, record: Record) -> int:
        """A number of tokens that the record has at least, where that alone is too many: tokens stand for a limited number of characters.
        0 where it takes encoding to know."""
        prompt = _length(record.prompt)
        row = prompt + max((_length(response) for response in record.responses), default=0)
        if not _over(prompt, self.room.prompt) and not _over(row, self.room.row):
            return 0
        prompt, row = (-(-characters // self.encoder.longest) for characters in (prompt, row))
        return row if _over(prompt, self.room.prompt) or _over(row, self.room.row) else 0

    def _too_long(self, record: Record, number: int, tokens: int, found: str) -> Fault:
        fault = self._fault(record, number, "too_long", f"it is too long ({tokens} tokens)", found, str(self.room))
        return replace(fault, tokens=tokens)

    def _fault(self, record: Record, number: int, cause: Cause, message: str, found: str, expected: str) -> Fault:
        return Fault(cause, Problem("data-record", f"{self._which(record, number)}{message}", record.place, found=found, expected=expected))

    def _which(self, record: Record, number: int) -> str:
        """What names a record that stands in no file."""
        return "" if record.place else f"record {number + 1} of {self.name}: "


def counted(found: Iterable[Fault]) -> dict[Cause, list[Fault]]:
    """Faults by cause."""
    found = list(found)
    return {cause: own for cause in CAUSES if (own := [fault for fault in found if fault.cause == cause])}


def spoken(found: Iterable[Fault]) -> str:
    """How many there are of each cause, where, and the longest."""
    return "; ".join(_spoken(cause, own) for cause, own in counted(found).items())


def _spoken(cause: Cause, own: Sequence[Fault]) -> str:
    longest = f", the longest of {max(fault.tokens for fault in own)} tokens" if cause == "too_long" else ""
    places = [str(fault.place) for fault in own if fault.place]
    more = ", …" if len(places) > PLACES else ""
    where = f" ({', '.join(_short(places[:PLACES]))}{more})" if places else ""
    return f"{len(own)} {CAUSES[cause]}{longest}{where}"


def _short(places: Sequence[str]) -> Iterator[str]:
    """Places of one file after another; of those after the first of a file the line alone."""
    before = ""
    for place in places:
        path, _, line = place.rpartition(":")
        yield f":{line}" if path == before else place
        before = path


def refused(name: str, found: Sequence[Fault], judged: int, room: Room) -> PlanError:
    """The error for data with such records: the first few in full, then all in a line. ``judged``: how many records were."""
    too_long = any(fault.cause == "too_long" for fault in found)
    shorter = f", --data.max_prompt {room.prompt} drops what is too long" if too_long and room.prompt else ""
    kinds: dict[str, Problem] = {}
    for fault in found:
        kinds.setdefault(fault.problem.message, fault.problem)
    told = Problem("data-records", f"{len(found)} of {judged} records of {name} cannot be used", found=spoken(found),
                   expected=str(room) if too_long else "records that every model of the run can be given",
                   remedy=f"correct them; or --bad-records skip leaves them out and counts them{shorter}")
    return PlanError(*[*kinds.values()][:SHOWN], told)
