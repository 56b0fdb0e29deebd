"""A clock for tests of deadlines: working processes have unlimited time, and hanging ones reach their
deadline soon."""

from rlflow.processes.deadline import LOOK

SAYS = "hangs"  # printed by a process, in one write, before it hangs


class HungClock:
    """Stands still, except while its process hangs: from the printed announcement until the process is gone.
    Pass the output and the end of the process to ``on_output``."""

    def __init__(self):
        self.now, self.hung = 0.0, False

    def on_output(self, data):
        self.hung = bool(data) and (self.hung or SAYS.encode() in data)

    def __call__(self):
        self.now += 2 * LOOK * self.hung  # the most that a deadline counts between two checks
        return self.now
