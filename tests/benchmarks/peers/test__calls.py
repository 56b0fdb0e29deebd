"""Iterations of equal calls: number of calls, and the end of the iterations."""

from rlflow.benchmarks.peers._calls import Iterations


def test_an_iteration_makes_the_set_number_of_calls():
    seconds = iter(range(1, 100))
    iterations = Iterations({"calls": 2, "iterations": 3}, lambda: next(seconds), tokens=5)
    first, last = iterations.next(2), iterations.next(2)
    rows = [*first["iterations"], *last["iterations"]]
    assert [(row["iteration"], row["wall"], row["tokens"]) for row in rows] == [
        (0, 3, 10),
        (1, 7, 10),
        (2, 11, 10),
    ]
    assert (first["ended"], last["ended"]) == (False, True)
    assert next(seconds) == 7, "nothing is called once all have been"
    assert "bytes" not in rows[0]
    counted = Iterations({"calls": 2, "iterations": 2}, lambda: 1.0, moved=iter((5, 0)).__next__).next(2)
    assert [row["bytes"] for row in counted["iterations"]] == [5, 0]
