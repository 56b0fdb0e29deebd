"""Where a stack that is shown ends is known by names of files and functions; these are the names that the files and functions have."""

import sys

import pytest

from rlflow.execution import apply, executor
from rlflow.watchdog import dog, stacks

DUMP = """Current thread 0x1 (most recent call first):
  File "/home/me/flow.py", line 7 in judge
  File "/opt/rlflow/execution/apply.py", line 30 in apply_stage
  File "/opt/rlflow/runs/loop.py", line 5 in run

Thread 0x2 (most recent call first):
  File "/usr/lib/python3/threading.py", line 3 in wait
"""


@pytest.mark.parametrize("module", [apply, executor])
def test_the_watchdog_knows_the_files_that_call_nodes(module):
    assert dog.RUNNER in module.__file__


def test_of_each_thread_that_runs_a_node_the_frames_of_the_node_are_shown():
    assert stacks.shown(DUMP, lambda path, name: dog.RUNNER in path) == "    home/me/flow.py:7 in judge"


def test_the_methods_within_which_a_workers_own_code_runs_are_methods_of_its_actor():
    pytest.importorskip("ray")
    from rlflow.cluster.health import postmortem
    from rlflow.cluster.rpc import actor

    host = actor.Host.__ray_metadata__.modified_class
    assert {name for name in actor.CALLS if callable(getattr(host, name, None))} == actor.CALLS
    assert sys.modules[host.__module__].__file__.endswith(postmortem.HOST)
