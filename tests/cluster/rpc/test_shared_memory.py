"""Shared memory between processes: posted frames are read unchanged, memory is reused and bounded, and no
death leaves any."""

import os
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Kind, Level
from rlflow.author.copy_on_write import file_memory, writable_copy
from rlflow.cluster.rpc.row_messages import RowMailbox
from rlflow.cluster.rpc.shared_memory import (
    HEAD,
    OPEN,
    WASTE,
    SharedFrame,
    SharedInbox,
    SharedOutbox,
    rounded,
)
from rlflow.execution.wire.column_wire import BatchFrame, pack, unpack


def numbers(count, first=0):
    return Batch(
        Axis.fresh(count), {"x": Data(Kind(Level.ROW, "float32"), torch.arange(first, first + count).float())}
    )


def read(inbox, at):
    return unpack(inbox.read(at).numpy().data)


def done(inbox, at):
    """Read a frame, and drop it."""
    inbox.read(at)


def test_the_memory_of_a_released_frame_is_reused():
    outbox, inbox = SharedOutbox(), SharedInbox()
    first, second = outbox.write(BatchFrame(numbers(5000))), outbox.write(BatchFrame(numbers(5000, 7)))
    assert first.descriptor != second.descriptor  # the first frame is not read yet
    assert bytes(inbox.read(first).numpy().tobytes()) == pack(numbers(5000))
    held = read(inbox, second).data["x"].value[1000:1002]
    third, fourth = outbox.write(BatchFrame(numbers(4900, 9))), outbox.write(BatchFrame(numbers(4900, 11)))
    assert (third.descriptor, third.mark) == (first.descriptor, first.mark)
    assert fourth.descriptor != second.descriptor  # two numbers of the second frame are still in use
    assert held.tolist() == [1007.0, 1008.0]
    assert read(inbox, third).data["x"].value[0] == 9.0
    assert outbox.nbytes == first.room + second.room + fourth.room


def test_the_receiver_reads_the_memory_of_the_sender():
    outbox, inbox = SharedOutbox(), SharedInbox()
    at = outbox.write(BatchFrame(numbers(5000)))
    column = read(inbox, at).data["x"].value
    # only a test does so: it shows that nothing was copied
    outbox._segments[0].memory[HEAD : HEAD + at.size].view(torch.float32)[-1] = 5.0
    assert column[-1] == 5.0


def test_writes_of_the_receiver_stay_local():
    outbox, inbox = SharedOutbox(), SharedInbox()
    at = outbox.write(BatchFrame(numbers(5000)))
    before = outbox._segments[0].memory.clone()
    column = read(inbox, at).data["x"].value
    seen = writable_copy(column)
    seen.zero_()
    assert torch.equal(column, numbers(5000).data["x"].value)
    del column
    assert outbox._segments[0].in_use
    assert torch.equal(outbox._segments[0].memory, before)
    del seen
    assert not outbox._segments[0].in_use


def test_memory_seen_by_a_fork_is_not_reused():
    outbox, inbox = SharedOutbox(), SharedInbox()
    column = read(inbox, outbox.write(BatchFrame(numbers(5000)))).data["x"].value
    child = os.fork()
    if not child:
        del column  # as when it ends normally
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert outbox._segments[0].in_use
    del column
    assert outbox._segments[0].in_use  # a child may still use it
    assert outbox.write(BatchFrame(numbers(5000))).descriptor != outbox._segments[0].descriptor


LATE = """
import os
reading = []
os.register_at_fork(before=lambda: reading and reading.pop()())  # known first, so that it runs last: as another thread may before the fork
import torch
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.cluster.rpc.shared_memory import SharedInbox, SharedOutbox
from rlflow.execution.wire.column_wire import BatchFrame
from rlflow.author.columns import Kind, Level
outbox, inbox, rows = SharedOutbox(), SharedInbox(), []
at = outbox.write(BatchFrame(Batch(Axis.fresh(9000), {"x": Data(Kind(Level.ROW, "float32"), torch.ones(9000))})))
reading.append(lambda: rows.append(inbox.read(at)))
child = os.fork()
rows.clear()  # in the fork too
if not child:
    os._exit(0)
os.waitpid(child, 0)
print(outbox._segments[0].in_use)
"""


@pytest.mark.slow
def test_memory_read_during_a_fork_also_belongs_to_the_fork():
    assert (
        subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True).stdout
        == "True\n"
    )


def test_rows_are_copied_out_near_the_memory_bound():
    outbox, inbox = SharedOutbox(limit=2 << 20), SharedInbox()
    first, second = outbox.write(BatchFrame(numbers(30_000))), outbox.write(BatchFrame(numbers(30_000)))
    assert (first.stays, second.stays) == (True, False)
    assert file_memory(read(inbox, first).data["x"].value) is not None
    assert file_memory(read(inbox, second).data["x"].value) is None


def test_segment_sizes_waste_at_most_a_quarter():
    outbox, inbox = SharedOutbox(), SharedInbox()
    large = outbox.write(BatchFrame(numbers(200_000)))
    done(inbox, large)
    small = outbox.write(BatchFrame(numbers(2000)))
    assert small.descriptor != large.descriptor
    assert large.room > WASTE * (HEAD + small.size)
    for size in (1, 4096, 4097, 65_535, 65_537, 1_000_000, 123_456_789):
        assert size <= rounded(size) <= max(size * 5 // 4 + 1, size + 4096)


def test_all_segments_together_stay_within_the_bound():
    outbox, inbox = SharedOutbox(limit=1 << 20), SharedInbox()
    first = outbox.write(BatchFrame(numbers(30_000)))
    assert outbox.write(BatchFrame(numbers(30_000))) is None  # no room for a further segment
    done(inbox, first)
    assert outbox.write(BatchFrame(numbers(2000))).room <= 1 << 20
    assert outbox.write(BatchFrame(numbers(45_000))) is not None  # the free segment was removed
    assert outbox.nbytes <= 1 << 20


def test_unread_frames_are_dropped_after_their_iteration():
    outbox, inbox = SharedOutbox(), SharedInbox()
    lost, later = outbox.write(BatchFrame(numbers(3000)), 4), outbox.write(BatchFrame(numbers(3000, 1)), 5)
    kept = read(inbox, outbox.write(BatchFrame(numbers(3000, 2)), 4)).data["x"].value
    outbox.clear(4)
    assert outbox.nbytes == 3 * later.room  # receivers may be about to release theirs
    outbox.clear(5)
    assert outbox.nbytes == later.room
    assert kept[0] == 2.0  # a receiver that keeps rows longer is the only owner of their memory
    assert read(inbox, later).data["x"].value[0] == 1.0
    with pytest.raises(OSError, match=r"does not exist any more|No such file"):
        inbox.read(lost)


def open_bytes():
    """Return the bytes of shared memory that this process has open, as sender or receiver."""
    files = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
    stats = [os.stat(file) for file in files if os.path.lexists(file) and "rlflow-rows" in os.readlink(file)]
    return sum({stat.st_ino: stat.st_blocks * 512 for stat in stats}.values())


def test_a_receiver_keeps_no_memory_that_the_sender_has_freed():
    outbox, inbox, before = SharedOutbox(limit=8 << 20), SharedInbox(), open_bytes()
    # growing rows, like growing answers: older segments make room
    for count in range(20_000, 300_000, 20_000):
        done(inbox, outbox.write(BatchFrame(numbers(count))))
    assert open_bytes() - before == outbox.nbytes <= 8 << 20
    kept = read(inbox, outbox.write(BatchFrame(numbers(300_000)))).data["x"].value
    outbox.clear(0)
    outbox.clear(1)  # given up, because its receiver keeps its rows
    inbox.clear()
    assert kept[-1] == 299_999.0
    del kept
    assert open_bytes() - before == outbox.nbytes


def test_a_reused_descriptor_is_not_read_as_a_frame():
    outbox, inbox = SharedOutbox(), SharedInbox()
    at = outbox.write(BatchFrame(numbers(3000)))
    for other in (
        at._replace(mark=at.mark + 1),
        at._replace(room=at.room * 2),
        at._replace(descriptor=10_000),
    ):
        with pytest.raises(OSError, match=r"does not exist any more|No such file"):
            inbox.read(other)


def test_a_receiver_keeps_few_segments_open():
    outbox, inbox = SharedOutbox(), SharedInbox()
    frames = [outbox.write(BatchFrame(numbers(10, first))) for first in range(OPEN + 9)]
    columns = [read(inbox, at).data["x"].value for at in frames]
    assert [int(column[0]) for column in columns] == list(range(OPEN + 9))
    assert len(inbox._open) == OPEN


def test_frames_take_another_way_if_the_machine_is_full():
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # as if its memory were this small
        mailbox, row_messages = RowMailbox(), [numbers(200_000), numbers(20_000)]
        kinds = [isinstance(mailbox.message(batch, shared=True), SharedFrame) for batch in row_messages]
        os._exit(0 if kinds == [False, True] else 1)
    assert os.waitpid(child, 0)[1] == 0


def forked(work):
    """Start a process that does the work; return it and the end of a pipe that it writes lines to."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        try:
            work(lambda *line: os.write(there, f"{' '.join(map(str, line))}\n".encode()))
        finally:
            os._exit(0)
    os.close(there)
    return child, os.fdopen(here)


def kill_and_wait(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.fixture
def held_back():
    """Block a signal that a process can wait for."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    yield signal.SIGUSR1
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


@pytest.mark.parametrize("reads", [0, 1, 9])
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_a_kill_at_any_moment_leaks_no_shared_memory(victim, reads, held_back):
    before = set(os.listdir("/dev/shm"))

    def send(tell):
        outbox = SharedOutbox()
        frames = [outbox.write(BatchFrame(numbers(9000, first)), first) for first in range(9)]
        tell(*(int(value) for at in frames for value in at))
        signal.sigwait({held_back})
        outbox.clear(9)
        held = outbox.nbytes
        outbox.clear(10)
        tell(held, outbox.nbytes)

    def receive(tell):
        columns = [read(inbox, at).data["x"].value for at in frames[:reads]]
        tell("read")
        signal.sigwait({held_back})
        tell(
            all(
                torch.equal(column, numbers(9000, first).data["x"].value)
                for first, column in enumerate(columns)
            )
        )

    sender, told = forked(send)
    inbox, values = SharedInbox(), [int(value) for value in next(told).split()]
    frames = [
        SharedFrame(*values[first : first + len(SharedFrame._fields)])
        for first in range(0, len(values), len(SharedFrame._fields))
    ]
    receiver, heard = forked(receive)
    try:
        assert next(heard) == "read\n"
        kill_and_wait(sender if victim == "sender" else receiver)
        os.kill(receiver if victim == "sender" else sender, held_back)
        if victim == "sender":
            assert next(heard) == "True\n"
        else:
            held, left = map(int, next(told).split())
            assert held > left == 0
        assert set(os.listdir("/dev/shm")) <= before
    finally:
        kill_and_wait(receiver if victim == "sender" else sender)
        told.close()
        heard.close()


SENDER = """
import sys
sys.path[:0] = {path!r}
import torch
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.cluster.rpc.shared_memory import SharedOutbox
from rlflow.execution.wire.column_wire import BatchFrame
from rlflow.author.columns import Kind, Level
outbox = SharedOutbox()
at = outbox.write(BatchFrame(Batch(Axis.fresh(3), {{"x": Data(Kind(Level.ROW, "float32"), torch.tensor([1.0, 2.0, 3.0]))}})))
print(*map(int, at), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_sender_leaves_no_shared_memory():
    before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-c", SENDER.format(path=sys.path)]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        at = SharedFrame(*map(int, sender.stdout.readline().split()))
        inbox = SharedInbox()
        column = read(inbox, at).data["x"].value
        assert column.tolist() == [1.0, 2.0, 3.0]
        assert os.stat(f"/proc/{at.pid}/fd/{at.descriptor}").st_nlink == 0  # it has no name
        os.kill(sender.pid, signal.SIGKILL)
        sender.wait()
        # a process that has it open keeps it
        assert column.tolist() == writable_copy(column).tolist() == [1.0, 2.0, 3.0]
        assert read(inbox, at).data["x"].value.tolist() == [1.0, 2.0, 3.0]  # and opens no other in its place
        with pytest.raises(OSError, match="No such file"):
            SharedInbox().read(at)
        assert set(Path("/dev/shm").iterdir()) <= before
    finally:
        sender.kill()
        sender.communicate()


@pytest.mark.slow
def test_a_run_on_pools_does_not_use_dev_shm(tmp_path):
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mounted = "mount -t tmpfs -o size=1m tmpfs /dev/shm"  # a container has 64 MB
    if subprocess.run([*inside, mounted], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount another /dev/shm")
    command = shlex.join(
        [
            sys.executable,
            "-m",
            "rlflow.cli.main",
            "run",
            "grpo",
            "--backend",
            "null",
            "--pools",
            "train=2,rollout=2",
            "--prompts",
            "64",
            "--hp.samples",
            "8",
            "--hp.max_tokens",
            "512",
            "--iterations",
            "2",
            "--out",
            str(tmp_path),
        ]
    )
    ran = subprocess.run(
        [*inside, f"{mounted} && {command} && echo left: $(ls -A /dev/shm)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "2 iterations in" in ran.stdout
    assert ran.stdout.endswith("left:\n")
