"""Settings of all tests: fixed thread counts, so that a test gives the same numbers on every machine, and no
time limits for drawing examples. `pythonpath` in pyproject.toml lists the folders of shared test modules."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # also for processes that tests start; read when torch is imported
# as for a Ray that a run starts; read when Ray is imported, which the first test file may do
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
# until tests are collected: imported modules are not garbage, and searching them takes seconds
gc.disable()
sys.dont_write_bytecode = False  # tests and the processes that they start compile a module once
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
torch.set_num_threads(1)
# processes started by tests would ignore what `nohup` ignores
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# without a time limit, because other work on the machine would decide; a fixture of a test may be shared by
# all its examples. A test that names health checks itself replaces these
LENIENT = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("any machine", max_examples=50, deadline=None, suppress_health_check=LENIENT)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def lacking():
    """Return a function that a test calls with a reason if the package of an engine is not installed. It
    fails the test, because a skipped test would go unnoticed. With RLFLOW_SKIP_ENGINES=1 in the environment,
    it skips the test."""

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
    """Run files with slow tests first, so that parallel processes do not wait long for one another at the
    end."""
    if not hasattr(config, "workerinput"):  # a single process runs them in the requested order
        return
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Collect garbage from then on, without searching the modules that were imported before."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure(config):
    gc.unfreeze()  # some packages report uncollected objects at the end


@pytest.fixture(autouse=True)
def importable():
    """Restore the module path, because loading a flow puts its folder first; later tests and the processes
    that they start must not find modules in it."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture
def on_ranks(tmp_path):
    """``on_ranks(count, action)``: the results of ``action(rank)``, plain values, on each rank of a gloo
    group. Ranks are forks of this process, because importing torch takes seconds."""

    def on_ranks(count, action):
        folder = tmp_path / f"ranks-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        children = [_forked(folder, rank, count, action) for rank in range(count)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * count, "\n".join((folder / f"{rank}.json").read_text() for rank in range(count))
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]

    return on_ranks


def _forked(folder, rank, count, action):
    """Return the process id of one rank, which writes its result to a file."""
    child = os.fork()
    if child:
        return child
    gc.freeze()  # garbage of earlier tests, such as process groups, could wait for threads that a fork does not have
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
    """Run the tests of a file in one process, and those of a backend whose ranks several files share."""
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
