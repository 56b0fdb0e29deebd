import pytest

from rlflow.errors import PlanError
from rlflow.processes.declare import Service
from rlflow.services.gpus import share, visible


def test_services_take_the_last_gpus_and_the_run_the_rest():
    services = [
        Service(name="judge", run="serve", gpus=2),
        Service(name="search", run="serve"),
        Service(name="far", run="http://far"),
    ]
    shares, left = share(services, ["4", "5", "6"])
    assert shares == {"judge": ("5", "6"), "search": (), "far": ()}
    assert left == ("4",)


def test_more_gpus_than_exist_are_refused():
    with pytest.raises(PlanError, match="(?s)needs 2 GPUs.*3 on this machine, and 1 is not used"):
        share([Service(name=name, run="serve", gpus=2) for name in ("judge", "search")], ["0", "1", "2"])


def test_only_visible_gpus_count(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert visible(8) == ["3", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible(8) == []
