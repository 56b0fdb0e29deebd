"""The installed Ray has the private parts that rlflow uses, and only one file of rlflow names them."""

import inspect
from pathlib import Path

import ray  # noqa: F401  loads the private modules
from private_parts import changes, check_parts, elsewhere

from rlflow.cluster import ray_private

FILE = "rlflow/cluster/ray_private.py"
PARTS = {
    "ray._private.services.start_ray_process": ("command", "process_type", "env_updates"),
    **{f"ray._private.node.Node.{name}": ("self",) for name in ray_private.UNUSED},
    "ray._private.ray_constants.ENABLE_RAY_CLUSTER": None,
    "ray._private.worker.print_to_stdstream": None,
    "ray._raylet.AuthenticationTokenLoader.instance": None,
    "ray._raylet.AuthenticationTokenLoader.reset_cache": None,
    "ray._raylet.persist_port": None,
    **{f"ray._raylet.{port}_PORT_NAME": None for port in ray_private.PORTS},
}


def test_ray_has_the_private_parts():
    check_parts("ray", FILE, PARTS)
    # parts without a name to look up
    assert "self._webui_url" in inspect.getsource(ray_private.node_class()), "adapt has_no_dashboard"
    assert Path(ray_private.setup_worker()).is_file(), "adapt setup_worker: Ray moved the file"


def test_only_one_file_names_private_parts_of_ray():
    assert elsewhere("ray", [FILE], PARTS) == []


def test_a_missing_part_and_a_missing_parameter_are_reported():
    assert (
        changes({"ray._private.gone": None, "ray.init": ("address", "gone")})[0]
        == "ray._private.gone is gone"
    )
    assert changes({"ray._private.services.get_node_ip_address": ("gone",)})[0].endswith("and not gone")
    assert changes({"ray._private.services.gone": None})[0] == "ray._private.services.gone is gone"
