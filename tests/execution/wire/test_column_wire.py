"""Batches as bytes: unpacking restores them bit for bit, and all other bytes are refused."""

import contextlib
import copy
import itertools
import struct
import zlib

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import Batch
from rlflow.author.axis import Axis
from rlflow.author.batch import Data
from rlflow.author.columns import Kind, Level
from rlflow.author.messages import MARK, packed
from rlflow.execution.wire import column_wire
from rlflow.execution.wire.column_wire import WireError, pack, unpack
from rlflow.execution.wire.header import DTYPES

QUICK = settings(max_examples=100, deadline=None)
NAMES = st.sampled_from(sorted(DTYPES))
TEXTS = st.text(st.characters(exclude_categories=()), max_size=6)  # with surrogates


def bits(tensor):
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()),
    )


def contents(batch):
    """Return all parts of a batch, as bits."""
    columns = []
    for name, data in batch.data.items():
        values = data.value if isinstance(data.value, tuple) else (data.value,)
        values = tuple(bits(value) if isinstance(value, torch.Tensor) else value for value in values)
        columns.append(
            (name, data.kind, type(data.value), values, None if data.lengths is None else bits(data.lengths))
        )
    return bits(batch.axis.keys), batch.axis.grouped, columns


@st.composite
def tensors(draw, dtype, *shape):
    """Draw any bits: NaNs with a payload, infinities, denormals."""
    kind = DTYPES[dtype]
    size = torch.Size(shape).numel() * kind.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype=np.uint8).copy()
    return (
        torch.from_numpy(raw & 1 if kind is torch.bool else raw).view(kind).reshape(shape)
        if size
        else torch.empty(shape, dtype=kind)
    )


@st.composite
def columns(draw, axis):
    level, dtype, rows = draw(st.sampled_from(list(Level))), draw(NAMES), len(axis)
    if level is Level.TEXT:
        return Data(Kind(level), tuple(draw(st.lists(TEXTS, min_size=rows, max_size=rows))))
    kind = Kind(level, draw(st.sampled_from([dtype, None])))
    if level is Level.SCALAR:
        every_rank = [draw(tensors(dtype)) for _ in range(draw(st.integers(0, 3)))]
        return Data(kind, draw(st.sampled_from([tuple(every_rank), *every_rank])))
    inner = draw(st.sampled_from([(), (2,), (0, 3)]))
    if level in (Level.ROW, Level.GROUP):
        return Data(kind, draw(tensors(dtype, axis.groups if level is Level.GROUP else rows, *inner)))
    lengths = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)), dtype=torch.int64)
    return Data(kind, draw(tensors(dtype, int(lengths.sum()), *inner)), lengths)


@st.composite
def batches(draw):
    groups = torch.tensor(draw(st.lists(st.integers(-(2**62), 2**62), max_size=5)), dtype=torch.int64)
    axis = Axis(torch.stack([groups, torch.arange(len(groups))], 1), grouped=draw(st.booleans()))
    return Batch(axis, {name: draw(columns(axis)) for name in draw(st.lists(TEXTS, max_size=4, unique=True))})


def small():
    """Return a batch with a column of each level and form: two groups, three rows, one of them without
    tokens."""
    kinds = {
        "keep": Kind(Level.GROUP, "bool"),
        "prompt_tokens": Kind(Level.PROMPT, "int64"),
        "bar": Kind(Level.SCALAR, "float32"),
    }
    batch = Batch.of(
        group=[3, 3, 8],
        keep=[True, True, False],
        rewards=[[0.5, 1.5], [], [2.5]],
        prompt_tokens=[[1], [2, 3], [4]],
        scores=[1.0, float("nan"), 3.0],
        completion=["a", "", "ü\ud83d"],
        bar=0.25,
        kinds=kinds,
    )
    every_rank = Data(Kind(Level.SCALAR, "float32"), (torch.tensor(1.0), torch.tensor(2.0)))
    half = Data(
        Kind(Level.TOKEN, "bfloat16"), torch.tensor([1.0, 2.0, 3.0]).bfloat16(), torch.tensor([2, 0, 1])
    )
    return Batch(batch.axis, batch.data | {"every": every_rank, "half": half})


SMALL = small()
FRAME = pack(SMALL)
HEADER = FRAME[column_wire.HEAD : column_wire.HEAD + column_wire._PREFIX.unpack_from(FRAME)[2]]
AFTER = FRAME[column_wire.HEAD + len(HEADER) :]


# -- round trips
# ------------------------------------------------------------------------------------------------------------


@QUICK
@given(batches())
def test_packing_and_unpacking_keeps_every_bit(batch):
    frame = pack(batch)
    again = unpack(frame)
    assert contents(again) == contents(batch)
    assert again.axis.parent is None
    assert pack(again) == frame


@pytest.mark.parametrize(
    "make", [bytes, bytearray, memoryview, lambda frame: memoryview(b"x" + frame)[1:], np.frombuffer]
)
def test_a_frame_may_be_anywhere_in_memory(make):
    frame = make(FRAME) if make is not np.frombuffer else np.frombuffer(FRAME, dtype=np.uint8)
    again = unpack(frame)
    del frame
    assert contents(again) == contents(SMALL)
    stored = [data.value for data in again.data.values() if isinstance(data.value, torch.Tensor)]
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in stored)


def test_columns_are_views_of_an_aligned_frame_which_they_keep_alive():
    frame = bytearray(FRAME)
    batch = unpack(frame)
    lo = np.frombuffer(frame, dtype=np.uint8).ctypes.data
    stored = [
        batch.axis.keys,
        batch.data["scores"].value,
        batch.data["half"].value,
        batch.data["rewards"].lengths,
    ]
    assert all(lo <= tensor.data_ptr() < lo + len(frame) for tensor in stored)
    assert [(tensor.data_ptr() - lo) % column_wire.ALIGNMENT for tensor in stored] == [0] * 4
    assert not lo <= batch["scores"].data_ptr() < lo + len(frame)  # a stage may write into its inputs
    with pytest.raises(BufferError):
        frame.clear()


def test_a_batch_of_any_layout_in_memory_is_packed():
    wide = torch.arange(12.0).reshape(3, 4).t().requires_grad_()
    batch = Batch(
        Axis.fresh(4),
        {"a": Data(Kind(Level.ROW, "float32"), wide), "b": Data(Kind(Level.ROW, "float32"), wide[:, 1])},
    )
    assert torch.equal(unpack(pack(batch)).data["a"].value, wide)
    assert torch.equal(unpack(pack(batch)).data["b"].value, wide[:, 1])


def test_long_and_empty_texts_are_packed():
    texts = ("ü" * 300_000, "", "\udfff\ud800", "\0", "😀")
    batch = Batch(Axis.fresh(5), {"completion": Data(Kind(Level.TEXT), texts)})
    assert unpack(pack(batch)).data["completion"].value == texts
    assert (
        unpack(pack(Batch(Axis.fresh(0), {"completion": Data(Kind(Level.TEXT), ())})))
        .data["completion"]
        .value
        == ()
    )


# `is_messages` refuses lone surrogates
UNICODE = st.text(max_size=6)
MESSAGES = st.lists(st.fixed_dictionaries({"role": UNICODE, "content": UNICODE}), min_size=1, max_size=3)


@QUICK
@given(st.lists(TEXTS | MESSAGES | TEXTS.map(lambda text: MARK + text), max_size=4))
def test_messages_and_texts_travel_together_unmixed(rows):
    values = tuple(row if isinstance(row, str) else packed(row) for row in rows)
    batch = Batch(Axis.fresh(len(rows)), {"question": Data(Kind(Level.TEXT), values)})
    arrived = unpack(pack(batch))
    assert arrived["question"] == rows
    assert bytes(pack(arrived)) == bytes(pack(batch))


# -- what cannot be packed
# -------------------------------------------------------------------------------------------------------


def of_rows(rows, kind, value, lengths=None):
    return Batch(
        Axis.fresh(rows), {"x": Data(kind, value, None if lengths is None else torch.tensor(lengths))}
    )


UNFIT = {
    "complex numbers": of_rows(1, Kind(Level.ROW), torch.ones(1, dtype=torch.complex64)),
    "another family": of_rows(1, Kind(Level.ROW, "float32"), torch.ones(1, dtype=torch.int64)),
    "too few rows": of_rows(2, Kind(Level.ROW), torch.ones(1)),
    "a scalar for rows": of_rows(1, Kind(Level.ROW), torch.tensor(1.0)),
    "rows for a scalar": of_rows(1, Kind(Level.SCALAR), torch.ones(1)),
    "a number for a scalar": of_rows(1, Kind(Level.SCALAR), 1.0),
    "lengths of other rows": of_rows(2, Kind(Level.TOKEN), torch.ones(2), [2]),
    "lengths of other entries": of_rows(2, Kind(Level.TOKEN), torch.ones(3), [2, 2]),
    "negative lengths": of_rows(2, Kind(Level.TOKEN), torch.ones(1), [2, -1]),
    "lengths whose sum runs over": of_rows(3, Kind(Level.TOKEN), torch.ones(3), [2**63 - 1, 2**63 - 1, 5]),
    "tokens without lengths": of_rows(1, Kind(Level.TOKEN), torch.ones(1)),
    "rows with lengths": of_rows(1, Kind(Level.ROW), torch.ones(1), [1]),
    "lengths that are no int64": of_rows(1, Kind(Level.TOKEN), torch.ones(1), [1.0]),
    "too many dimensions": of_rows(1, Kind(Level.ROW), torch.ones([1] * 9)),
    "too few texts": of_rows(2, Kind(Level.TEXT), ("a",)),
    "text that is no text": of_rows(1, Kind(Level.TEXT), (b"a",)),
    "text with a dtype": of_rows(1, Kind(Level.TEXT, "int64"), ("a",)),
    "keys that are no int64": Batch(Axis(torch.ones(1, 2)), {}),
    "keys of no number": Batch(
        Axis(torch.ones(1, dtype=torch.int64)), {"x": Data(Kind(Level.GROUP), torch.ones(1))}
    ),
    "keys of one number": Batch(Axis(torch.ones(1, 1, dtype=torch.int64)), {}),
}


@pytest.mark.parametrize("what", UNFIT)
def test_an_invalid_batch_is_refused_when_it_is_made(what):
    with pytest.raises(WireError, match="found .*, expected ") as caught:
        pack(UNFIT[what])
    assert ("column 'x'" in str(caught.value)) != ("keys" in what)


# -- damage
# ------------------------------------------------------------------------------------------------------------


def sound(batch):
    """Use a batch as readers do: take its rows, each of which moves, and pad them."""
    turned = batch.rows(torch.arange(len(batch)).flip(0))
    assert len(turned) == len(batch)
    assert all(turned[name] is not None for name in batch.columns)


def test_a_truncated_or_extended_frame_is_refused():
    for end in range(len(FRAME)):
        with pytest.raises(WireError):
            unpack(FRAME[:end])
    for more in (b"\0", bytes(64), FRAME):
        with pytest.raises(WireError):
            unpack(FRAME + more)


def test_a_changed_byte_gives_a_valid_batch_or_an_error():
    for place in range(len(FRAME)):
        frame = bytearray(FRAME)
        frame[place] ^= 0xFF
        if place < len(FRAME) - len(AFTER):
            with pytest.raises(WireError, match="checksum|bytes|version"):
                unpack(frame)
        else:
            with contextlib.suppress(WireError):
                sound(unpack(frame))


@QUICK
@given(st.binary(max_size=80))
def test_other_bytes_are_refused(data):
    for frame in (data, FRAME[:8] + data, FRAME[: column_wire.HEAD] + data):
        with pytest.raises(WireError):
            unpack(frame)


def test_a_frame_is_never_larger_than_the_limit():
    with pytest.raises(
        WireError, match=f"found {len(FRAME)} bytes, expected {column_wire.HEAD} to {len(FRAME) - 1}"
    ):
        unpack(FRAME, limit=len(FRAME) - 1)
    assert len(unpack(FRAME, limit=len(FRAME))) == 3


@pytest.mark.parametrize("data", ["text", None, 3, memoryview(FRAME)[::2]])
def test_values_other_than_bytes_are_refused(data):
    with pytest.raises(WireError):
        unpack(data)


# -- frames with valid checksums and wrong contents
# -------------------------------------------------------------------------


def framed(header, payload, version=column_wire.VERSION, magic=column_wire.MAGIC, length=None, size=None):
    length, size = (len(header) if length is None else length), (len(payload) if size is None else size)
    prefix = struct.pack("<8sIIQ", magic, version, length, size)
    return prefix + struct.pack("<I", zlib.crc32(header, zlib.crc32(prefix))) + header + payload


def frame_of(header, *buffers, **other):
    """Return a frame with this header, valid or not, and these buffers in their places."""
    raw = header if isinstance(header, bytes) else msgpack.packb(header, unicode_errors="surrogatepass")
    payload = b""
    for buffer in buffers:
        data = buffer if isinstance(buffer, bytes) else np.asarray(buffer).tobytes()
        payload += bytes(-(column_wire.HEAD + len(raw) + len(payload)) % 64) + data
    return framed(raw, payload, **other)


KEYS = np.arange(4).reshape(2, 2)


def header(*listed, rows=2, grouped=False):
    return [grouped, rows, [list(column) for column in listed]]


ROW = ("x", "row", "float64", "tensor", [["float64", [2]]])
TOKEN = ("x", "token", "float64", "ragged", [["float64", [3]], ["int64", [2]]])
RUNS_OVER = ("x", "token", "float64", "ragged", [["float64", [3]], ["int64", [3]]])
TEXT = ("x", "text", None, "text", [["uint8", [3]], ["int64", [3]]])
ENTRIES = np.ones(3)


def but(column, place, value):
    return (*column[:place], value, *column[place + 1 :])


DEEP = b"\x91" * 5000 + b"\xc0"
WRONG = {
    "another version": frame_of(header(), KEYS, version=1),
    "another magic": frame_of(header(), KEYS, magic=b"RLFBATCH"[::-1]),
    "a header past the end": frame_of(header(), KEYS, length=2**32 - 1),
    "a payload past the end": frame_of(header(), KEYS, size=2**64 - 1),
    "a header that is no msgpack": frame_of(b"\xc1", KEYS),
    "a header of two values": frame_of(b"\xc0\xc0", KEYS),
    "a header that ends early": frame_of(b"\x93\xc2", KEYS),
    "a list said to be huge": frame_of(b"\xdd\xff\xff\xff\xff", KEYS),
    "a text said to be huge": frame_of(b"\xdb\xff\xff\xff\xff", KEYS),
    "a timestamp that is none": frame_of(b"\xd7\xff" + b"\xff" * 8, KEYS),
    "deep nesting": frame_of(DEEP, KEYS),
    "deep nesting in a column": frame_of(b"\x93\xc2\x02" + DEEP, KEYS),
    "a map": frame_of({"rows": 2}, KEYS),
    "one field more": frame_of([*header(), 1], KEYS),
    "rows that are no number": frame_of(header(rows=True), KEYS[:1]),
    "fewer than no rows": frame_of(header(rows=-1), KEYS),
    "more rows": frame_of(header(rows=3), KEYS),
    "rows without end": frame_of(header(rows=2**63), KEYS),
    "grouped neither true nor false": frame_of(header(grouped=1), KEYS),
    "one name twice": frame_of(header(ROW, ROW), KEYS, np.ones(2), np.ones(2)),
    "a name that is no text": frame_of(header(but(ROW, 0, 7)), KEYS, np.ones(2)),
    "an unknown level": frame_of(header(but(ROW, 1, "page")), KEYS, np.ones(2)),
    "an unknown dtype": frame_of(header(but(ROW, 4, [["float61", [2]]])), KEYS, np.ones(2)),
    "an attribute for a dtype": frame_of(header(but(ROW, 4, [["__class__", [2]]])), KEYS, np.ones(2)),
    "an unknown dtype of the kind": frame_of(header(but(ROW, 2, "float61")), KEYS, np.ones(2)),
    "a dtype of another family": frame_of(header(but(ROW, 2, "int64")), KEYS, np.ones(2)),
    "a smaller dtype": frame_of(header(but(ROW, 4, [["float32", [2]]])), KEYS, np.ones(2)),
    "an unknown form": frame_of(header(but(ROW, 3, "sparse")), KEYS, np.ones(2)),
    "another level's form": frame_of(header(but(ROW, 3, "ragged")), KEYS, np.ones(2)),
    "no buffer": frame_of(header(but(ROW, 4, [])), KEYS),
    "two buffers": frame_of(header(but(ROW, 4, ROW[4] * 2)), KEYS, np.ones(2), np.ones(2)),
    "another row count": frame_of(header(but(ROW, 4, [["float64", [3]]])), KEYS, np.ones(3)),
    "a shape of no rows": frame_of(header(but(ROW, 4, [["float64", []]])), KEYS, np.ones(1)),
    "a negative shape": frame_of(header(but(ROW, 4, [["float64", [-2, -1]]])), KEYS, np.ones(2)),
    "a shape of truths": frame_of(header(but(ROW, 4, [["float64", [2, True]]])), KEYS, np.ones(2)),
    "a shape without end": frame_of(header(but(ROW, 4, [["float64", [2, 2**40]]])), KEYS, np.ones(2)),
    "an empty shape without end": frame_of(
        header(but(ROW, 4, [["float64", [2, 0, 2**62, 2**62]]])), KEYS, b""
    ),
    "too many dimensions": frame_of(header(but(ROW, 4, [["float64", [2] + [1] * 90]])), KEYS, np.ones(2)),
    "groups for rows": frame_of(header(but(ROW, 1, "group")), np.zeros((2, 2), dtype=np.int64), np.ones(2)),
    "rows for a scalar": frame_of(header(but(ROW, 1, "scalar")), KEYS, np.ones(2)),
    "lengths of more": frame_of(header(TOKEN), KEYS, ENTRIES, np.array([2, 2])),
    "negative lengths": frame_of(header(TOKEN), KEYS, ENTRIES, np.array([4, -1])),
    "lengths whose sum runs over": frame_of(
        header(RUNS_OVER, rows=3), np.arange(6), ENTRIES, np.array([2**63 - 1, 2**63 - 1, 5])
    ),
    "lengths of other rows": frame_of(
        header(but(TOKEN, 4, [TOKEN[4][0], ["int64", [3]]])), KEYS, ENTRIES, np.ones(3, dtype=np.int64)
    ),
    "lengths of another dtype": frame_of(
        header(but(TOKEN, 4, [TOKEN[4][0], ["int32", [2]]])), KEYS, ENTRIES, np.array([2, 1], np.int32)
    ),
    "a truth of two": frame_of(header(("x", "row", "bool", "tensor", [["bool", [2]]])), KEYS, b"\x01\x02"),
    "offsets that go back": frame_of(header(TEXT), KEYS, b"abc", np.array([0, 4, 3])),
    "offsets that begin late": frame_of(header(TEXT), KEYS, b"abc", np.array([1, 2, 3])),
    "offsets that end early": frame_of(header(TEXT), KEYS, b"abc", np.array([0, 1, 2])),
    "negative offsets": frame_of(header(TEXT), KEYS, b"abc", np.array([0, -1, 3])),
    "offsets of other rows": frame_of(
        header(but(TEXT, 4, [TEXT[4][0], ["int64", [2]]])), KEYS, b"abc", np.array([0, 3])
    ),
    "no offsets": frame_of(header(but(TEXT, 4, [["uint8", [0]], ["int64", [0]]])), KEYS, b"", b""),
    "offsets in two dimensions": frame_of(
        header(but(TEXT, 4, [TEXT[4][0], ["int64", [3, 1]]])), KEYS, b"abc", np.array([0, 1, 3])
    ),
    "bytes in two dimensions": frame_of(
        header(but(TEXT, 4, [["uint8", [3, 1]], TEXT[4][1]])), KEYS, b"abc", np.array([0, 1, 3])
    ),
    "a name that drives a terminal": frame_of(header(but(ROW, 0, "\x1b[2J" * 99), ROW, ROW), KEYS, b""),
    "bytes that are no UTF-8": frame_of(header(TEXT), KEYS, b"a\xff\xfe", np.array([0, 1, 3])),
    "a character cut in two": frame_of(header(TEXT), KEYS, "aü".encode(), np.array([0, 2, 3])),
    "a mark without messages": frame_of(
        header(but(TEXT, 4, [["uint8", [len(MARK)]], ["int64", [3]]])),
        KEYS,
        MARK.encode(),
        np.array([0, len(MARK), len(MARK)]),
    ),
    "text with a dtype": frame_of(header(but(TEXT, 2, "int64")), KEYS, b"abc", np.array([0, 1, 3])),
    "a buffer more": frame_of(header(), KEYS, np.ones(2)),
    "a buffer less": frame_of(header(ROW), KEYS),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_inconsistent_frame_is_refused(what):
    with pytest.raises(WireError, match=r"found .*, expected ") as caught:
        unpack(WRONG[what])
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()
    assert str(copy.copy(caught.value)) == str(caught.value)  # it travels between processes


def test_the_frames_above_are_wrong_only_in_their_contents():
    assert unpack(frame_of(header(ROW), KEYS, np.ones(2)))["x"].tolist() == [1.0, 1.0]
    assert unpack(frame_of(header(TOKEN), KEYS, ENTRIES, np.array([2, 1])))["x"].tolist() == [
        [1.0, 1.0],
        [1.0, 0.0],
    ]
    assert unpack(frame_of(header(TEXT), KEYS, b"abc", np.array([0, 1, 3])))["x"] == ["a", "bc"]


def test_a_changed_header_byte_gives_a_valid_batch_or_an_error():
    for place, value in itertools.product(range(len(HEADER)), (0, 0x7F, 0xC0)):
        with contextlib.suppress(WireError):
            sound(unpack(framed(HEADER[:place] + bytes([value]) + HEADER[place + 1 :], AFTER)))
