"""Shared memory between processes: what is posted is read as it was, its memory is used again and bounded, and no death leaves any."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlflow.axis import Axis
from rlflow.batch import Batch, Data
from rlflow.cluster.rpc.shared_memory import HEAD, OPEN, WASTE, SharedFrame, SharedInbox, SharedOutbox, rounded
from rlflow.cluster.rpc.wire import BatchFrame, pack, unpack
from rlflow.columns import Kind, Level


def numbers(count, first=0):
    return Batch(Axis.fresh(count), {"x": Data(Kind(Level.ROW, "float32"), torch.arange(first, first + count).float())})


def read(inbox, at):
    return unpack(inbox.read(at).numpy().data)


def test_a_frame_is_read_as_it_was_posted_and_its_memory_is_used_again_once_it_was_copied():
    outbox, inbox = SharedOutbox(), SharedInbox()
    first, second = outbox.post(BatchFrame(numbers(5000))), outbox.post(BatchFrame(numbers(5000, 7)))
    assert first.descriptor != second.descriptor  # the first is not copied yet
    assert bytes(inbox.read(first).numpy().tobytes()) == pack(numbers(5000))
    assert torch.equal(read(inbox, second).data["x"].value, numbers(5000, 7).data["x"].value)
    inbox.done(first)
    third = outbox.post(BatchFrame(numbers(4900, 9)))
    assert (third.descriptor, third.mark) == (first.descriptor, first.mark)
    assert read(inbox, third).data["x"].value[0] == 9.0
    assert outbox.nbytes == first.room + second.room


def test_a_small_frame_does_not_take_a_large_segment_and_sizes_waste_at_most_a_quarter():
    outbox, inbox = SharedOutbox(), SharedInbox()
    large = outbox.post(BatchFrame(numbers(200_000)))
    inbox.done(large)
    small = outbox.post(BatchFrame(numbers(2000)))
    assert small.descriptor != large.descriptor
    assert large.room > WASTE * (HEAD + small.size)
    for size in (1, 4096, 4097, 65_535, 65_537, 1_000_000, 123_456_789):
        assert size <= rounded(size) <= max(size * 5 // 4 + 1, size + 4096)


def test_all_segments_together_stay_within_the_bound_and_free_ones_make_room():
    outbox, inbox = SharedOutbox(limit=1 << 20), SharedInbox()
    first = outbox.post(BatchFrame(numbers(30_000)))
    assert outbox.post(BatchFrame(numbers(30_000))) is None  # no room beside it
    inbox.done(first)
    assert outbox.post(BatchFrame(numbers(2000))).room <= 1 << 20
    assert outbox.post(BatchFrame(numbers(45_000))) is not None  # the free one went
    assert outbox.nbytes <= 1 << 20


def test_what_nobody_copied_is_given_up_with_its_iteration_and_what_is_for_later_stays():
    outbox, inbox = SharedOutbox(), SharedInbox()
    lost, later = outbox.post(BatchFrame(numbers(3000)), 4), outbox.post(BatchFrame(numbers(3000, 1)), 5)
    outbox.clear(4)
    assert outbox.nbytes == later.room
    assert read(inbox, later).data["x"].value[0] == 1.0
    with pytest.raises(OSError, match=r"is gone|No such file"):
        inbox.read(lost)


def test_a_descriptor_that_means_another_file_by_now_is_no_frame():
    outbox, inbox = SharedOutbox(), SharedInbox()
    at = outbox.post(BatchFrame(numbers(3000)))
    for other in (at._replace(mark=at.mark + 1), at._replace(room=at.room * 2), at._replace(descriptor=10_000)):
        with pytest.raises(OSError, match=r"is gone|No such file"):
            inbox.read(other)


def test_a_receiver_keeps_few_segments_open():
    outbox, inbox = SharedOutbox(), SharedInbox()
    frames = [outbox.post(BatchFrame(numbers(10, first))) for first in range(OPEN + 9)]
    assert [read(inbox, at).data["x"].value[0] for at in frames] == list(range(OPEN + 9))
    assert len(inbox._open) == OPEN


SENDER = """
import sys
sys.path[:0] = {path!r}
import torch
from rlflow.axis import Axis
from rlflow.batch import Batch, Data
from rlflow.cluster.rpc.shared_memory import SharedOutbox
from rlflow.cluster.rpc.wire import BatchFrame
from rlflow.columns import Kind, Level
outbox = SharedOutbox()
at = outbox.post(BatchFrame(Batch(Axis.fresh(3), {{"x": Data(Kind(Level.ROW, "float32"), torch.tensor([1.0, 2.0, 3.0]))}})))
print(*at, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_another_process_reads_it_sees_who_is_done_and_a_killed_sender_leaves_nothing():
    before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-c", SENDER.format(path=sys.path)]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        at = SharedFrame(*map(int, sender.stdout.readline().split()))
        inbox = SharedInbox()
        assert read(inbox, at).data["x"].value.tolist() == [1.0, 2.0, 3.0]
        assert os.stat(f"/proc/{at.pid}/fd/{at.descriptor}").st_nlink == 0  # it has no name
        os.kill(sender.pid, signal.SIGKILL)
        sender.wait()
        assert read(inbox, at).data["x"].value.tolist() == [1.0, 2.0, 3.0]  # whoever has it open keeps it
        with pytest.raises(OSError, match="No such file"):
            SharedInbox().read(at)
        assert set(Path("/dev/shm").iterdir()) <= before
    finally:
        sender.kill()
        sender.communicate()
