"""A clock for tests of deadlines: what works has all the time that it needs, and what hangs is at its
deadline soon."""

from rlflow.processes.deadline import LOOK

SAYS = "hangs"  # what a process prints, by one write, before it hangs


class HungClock:
    """Stands still, except from when the one process that it is of has printed that it hangs until that
    process is gone. ``on_output`` is told what it prints, and its end."""

    def __init__(self):
        self.now, self.hung = 0.0, False

    def on_output(self, data):
        self.hung = bool(data) and (self.hung or SAYS.encode() in data)

    def __call__(self):
        self.now += 2 * LOOK * self.hung  # the most that a deadline counts between two looks
        return self.now
