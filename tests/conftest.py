"""Threads are fixed, so that a test gives the same numbers on every machine; and how long a property takes to
draw decides nothing. Where tests find modules that several of them share is `pythonpath` in
pyproject.toml."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start, too; read when torch is imported
# as a Ray that a run starts has it; read when Ray is imported, which the first test file may do
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # no test starts a Ray by calling one that has ended
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112, the same

import gc
import json
import re
import signal
import sys
import traceback
from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

pytest_plugins = ("tiers",)
# until tests are collected: modules that are imported are no garbage, and looking through them takes seconds
gc.disable()
sys.dont_write_bytecode = False  # tests, and the processes that they start, compile a module once
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
torch.set_num_threads(1)
# what `nohup` ignores would be ignored by processes that tests start
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# no limit of time, which other work on the machine would decide; and a fixture of a test may be the same for
# all of its examples. A test that names health checks itself would replace these
LENIENT = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("any machine", max_examples=50, deadline=None, suppress_health_check=LENIENT)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def lacking():
    """What a test calls, with why, where the package of an engine is not installed: it fails, so that nothing
    is left out unseen. With RLFLOW_SKIP_ENGINES=1 in the environment it is skipped."""

    def end(why):
        if os.environ.get("RLFLOW_SKIP_ENGINES"):
            pytest.skip(why)
        pytest.fail(
            f"{why}: `make setup` installs it, RLFLOW_SKIP_ENGINES=1 skips the tests that need it",
            pytrace=False,
        )

    return end


@pytest.fixture
def vllm_installed(lacking):
    if find_spec("vllm") is None:
        lacking("the package 'vllm' is not installed")


def pytest_collection_modifyitems(config, items):
    """Files with slow tests first, so that of several processes none waits long for another in the end."""
    if not hasattr(config, "workerinput"):  # one process runs them in the order that it was asked for
        return
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Garbage is looked for from then on, and not among all that was imported."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure(config):
    gc.unfreeze()  # some packages report what nothing has collected in the end


@pytest.fixture(autouse=True)
def importable():
    """Later tests, and processes that they start, do not look for modules in folders of a test: loading a
    flow puts its folder first."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture
def on_ranks(tmp_path):
    """``on_ranks(count, action)``: what ``action(rank)`` gives, plain values, on each of so many ranks of a
    gloo group. They are forks of this process, since importing torch takes seconds."""

    def on_ranks(count, action):
        folder = tmp_path / f"ranks-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        children = [_forked(folder, rank, count, action) for rank in range(count)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * count, "\n".join((folder / f"{rank}.json").read_text() for rank in range(count))
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]

    return on_ranks


def _forked(folder, rank, count, action):
    """The process id of one rank, which leaves what came of it in a file."""
    child = os.fork()
    if child:
        return child
    code, said = 1, ""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", f"file://{folder}/meeting", timedelta(seconds=60), count, rank)
        said = json.dumps(action(rank))
        dist.barrier()
        code = 0
    except BaseException:
        said = traceback.format_exc()
    finally:
        (folder / f"{rank}.json").write_text(said)
        os._exit(code)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests run in one process; so do those of a backend whose ranks are started once for several
    files."""
    from xdist.scheduler import LoadFileScheduling

    class ByBackend(LoadFileScheduling):
        def _split_scope(self, nodeid):
            found = re.search(
                r"backends/test_(?:contract\.py.*\[)?(fsdp|local|null|deepspeed|vllm)\b", nodeid
            )
            # these three share their processes
            name = found and ("fsdp" if found[1] in ("local", "null") else found[1])
            return f"backend {name}" if name else super()._split_scope(nodeid)

    return ByBackend(config, log) if config.getvalue("dist") == "loadfile" else None
