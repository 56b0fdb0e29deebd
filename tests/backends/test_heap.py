"""Freed memory goes back where it piles up, and stays where it does not."""

import torch

from rlflow.backends.local.heap import Heap, give_back, resident

MIB = 1 << 20


def given_back(*sizes):
    """After which of these steps, of a process of so many bytes, memory is given back."""
    left, released = list(sizes), []
    heap = Heap(lambda: left.pop(0), lambda: released.append(len(sizes) - len(left) - 1))
    for _ in sizes:
        heap.step_ended()
    return released


def test_memory_is_given_back_when_a_process_has_grown_by_more_than_a_tenth():
    assert given_back(100, 105, 110, 110) == []
    assert given_back(100, 105, 111, 50, 115, 112) == [2, 4]


def test_what_a_step_needs_is_measured_after_memory_was_given_back_and_never_falls():
    assert given_back(100, 111, 140, 150, 154, 155) == [1, 5]
    assert given_back(100, 111, 60, 105, 111) == [1, 4]


def test_a_step_after_memory_was_given_back_says_what_steps_need():
    sizes, released = [100, 130, 140, 144], []
    heap = Heap(lambda: sizes.pop(0), lambda: released.append(len(sizes)))
    heap.step_ended()
    heap.give_back()
    for _ in range(3):
        heap.step_ended()
    assert released == [3, 0]  # as asked for, and at 144, a tenth more than 130


def test_pieces_of_freed_memory_are_given_back():
    pieces = [torch.ones(1 << 13) for _ in range(4096)]  # of 32 KiB, so that the C library keeps them
    before = resident()
    assert before > 128 * MIB
    last = pieces[-1]  # what lies behind it cannot shrink the heap by itself
    del pieces
    give_back()
    assert resident() < before - 100 * MIB
    assert last.sum() == 1 << 13
