"""Messages between a pool and its workers, which may be hostile: records of errors cross in their bounds."""

import msgpack
import pytest

from rlflow.errors import RemoteFailure
from rlflow.rewards import frames

RECORD = RemoteFailure("KeyError", "'\ud83c'", ("r.py:2, in f: d[x]",), ("a note",), "/r.py:2", "--flag")


def crossed(message, limit=frames.LIMIT):
    reader = frames.FrameReader(limit)
    reader.feed(frames.packed(message))
    return frames.unpacked(reader.next())


def test_a_message_and_the_record_in_it_arrive_as_they_were():
    message = [7, 0, {"score": 0.5, "others": {"depth": 2.0}}, ["raised", RECORD], None]
    assert crossed(message) == message


def test_the_largest_record_fits_a_reply():
    long = "\U0001f600" * (1 << 18)
    record = crossed(RemoteFailure(long, long, (long,) * 3, (*[long] * 30, "the last"), long, long))
    assert len(record.notes) == frames.NOTES
    assert record.notes[-1] == "the last"
    texts = (record.type, record.text, *record.lines, *record.notes[:-1], record.place, record.hint)
    assert {len(text) for text in texts} == {frames.TEXT}


def extension(body, code=1):
    return msgpack.packb(msgpack.ExtType(code, body))


FIELDS = ["KeyError", "'x'", [], [], "", ""]


@pytest.mark.parametrize(
    "body",
    [
        extension(msgpack.packb(FIELDS), code=2),
        extension(msgpack.packb(FIELDS[:-1])),
        extension(msgpack.packb(["KeyError", 1, *FIELDS[2:]])),
        extension(msgpack.packb(["KeyError", "", [1], [], "", ""])),
        extension(msgpack.packb(["KeyError", "", "line", [], "", ""])),
        extension(extension(msgpack.packb(FIELDS))),
        extension(b"\xc1"),
    ],
)
def test_a_record_that_no_worker_of_ours_can_have_sent_is_refused(body):
    with pytest.raises(ValueError):  # noqa: PT011 - msgpack and utf-8 have their own subclasses
        frames.unpacked(body)


def test_only_plain_values_and_records_can_be_sent():
    with pytest.raises(TypeError, match="contains object"):
        frames.packed([object()])
