"""Freed memory returns to the system if it accumulates, and stays otherwise."""

import torch

from rlflow.backends.local.heap import Heap, give_back, resident

MIB = 1 << 20


def given_back(*sizes):
    """Return the steps after which memory is released, for a process of these sizes in bytes."""
    left, released = list(sizes), []
    heap = Heap(lambda: left.pop(0), lambda: released.append(len(sizes) - len(left) - 1))
    for _ in sizes:
        heap.step_ended()
    return released


def test_memory_is_released_after_growth_by_more_than_a_tenth():
    assert given_back(100, 105, 110, 110) == []
    assert given_back(100, 105, 111, 50, 115, 112) == [2, 4]


def test_the_need_of_a_step_is_measured_after_a_release():
    assert given_back(100, 111, 140, 150, 154, 155) == [1, 5]
    assert given_back(100, 111, 60, 105, 111) == [1, 4]


def test_a_step_after_a_release_shows_the_need_of_steps():
    sizes, released = [100, 130, 140, 144], []
    heap = Heap(lambda: sizes.pop(0), lambda: released.append(len(sizes)))
    heap.step_ended()
    heap.give_back()
    for _ in range(3):
        heap.step_ended()
    assert released == [3, 0]  # as requested, and at 144, a tenth above 130


def test_small_pieces_of_freed_memory_are_released():
    pieces = [torch.ones(1 << 13) for _ in range(4096)]  # of 32 KiB, so that the C library keeps them
    before = resident()
    assert before > 128 * MIB
    last = pieces[-1]  # the memory after it cannot shrink the heap by itself
    del pieces
    give_back()
    assert resident() < before - 100 * MIB
    assert last.sum() == 1 << 13
