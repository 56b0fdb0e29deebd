"""A pool for all tests of a file, and functions that misbehave in every way."""

from collections.abc import Iterator

import pytest
from hung_clock import HungClock

from rlflow.rewards import RewardPool

HOSTILE = '''
import ctypes, math, os, signal, subprocess, sys, threading, time

import neighbour

def good(completion, answer): return completion == answer
def length(completion, bonus=0.0): return len(completion) + bonus
def imports(completion): return neighbour.VALUE
def chosen(completion):
    """What each completion does instead of being scored; a number is scored as itself."""
    return ACTIONS[completion]() if completion in ACTIONS else float(completion)

def sleep(): print("hangs", end=""); time.sleep(3600)
def hold(): print("hangs", end=""); ctypes.PyDLL(None).sleep(3600)  # in C, holding the lock of the interpreter
def stop(): print("hangs", end=""); os.kill(os.getpid(), signal.SIGSTOP)
def leave(): os._exit(3)
def leave_loudly(): print("the last words"); os._exit(3)
def kill(): os.kill(os.getpid(), signal.SIGKILL)
def segfault(): ctypes.string_at(0)
def close(): os.closerange(3, 256)
def fail(): raise ValueError("bad " + "row" * 100_000)
def quit(): sys.exit(0)
def interrupt(): raise KeyboardInterrupt
def recurse(): return recurse()
def unprintable():
    class Odd(Exception):
        def __str__(self): raise RuntimeError
    raise Odd
def print_much(): print("x" * 10_000_000); print("y" * 1000, file=sys.stderr); return 1
def read_input(): return float(len(sys.stdin.read()))
def close_output(): sys.stdout.close(); os.close(1); return 1
def child(): return subprocess.Popen(["sleep", "3600"]).pid
def meet():
    """Ends when two processes are in it."""
    met = os.path.join(os.path.dirname(neighbour.__file__), "met")
    try: os.mkfifo(met)
    except FileExistsError: open(met, "w").close()  # each waits for the other
    else: open(met).close()
    return 1
def tensor():
    import numpy
    return numpy.float32(0.5)

class Number:
    shape = ()
    def item(self): raise OSError("no item")

ACTIONS = {
    "hang": sleep, "hold": hold, "stop": stop, "exit": leave, "exit loudly": leave_loudly, "kill": kill, "segfault": segfault,
    "exit without an error": lambda: os._exit(0),
    "close": close, "raise": fail, "sys.exit": quit, "interrupt": interrupt, "recurse": recurse, "unprintable": unprintable,
    "nan": lambda: math.nan, "inf": lambda: -math.inf, "huge": lambda: 10**400, "text": lambda: "1.0", "list": lambda: [1.0],
    "complex": lambda: 1j, "100 MB": lambda: "x" * 100_000_000, "none": lambda: None, "odd": Number, "true": lambda: True, "int": lambda: 2,
    "numpy": tensor, "print": print_much, "stdin": read_input, "close stdout": close_output, "child": child,
    "meet": meet,
}
'''


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("user")
    (folder / "neighbour.py").write_text("VALUE = 4.0\n")
    (folder / "hostile.py").write_text(HOSTILE)
    return str(folder / "hostile.py")


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(2) as pool:
        yield pool


@pytest.fixture
def patient() -> Iterator[RewardPool]:
    """A pool with one process, where time passes only for a row that has printed that it hangs."""
    clock = HungClock()
    with RewardPool(1, clock=clock) as pool:
        pool.on_output = clock.on_output
        yield pool
