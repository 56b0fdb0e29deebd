"""Ways to find a flow: in a file, by name, or among the installed algorithms."""

import os
import sys

import pytest

from rlflow.author.load import load, load_flow, load_text, target
from rlflow.errors import FlowError, PlanError

FLOW = "from rlflow import flow\n\n@flow\ndef {name}(prompts, actor):\n    pass\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_file_is_loaded_once(write):
    path = write(FLOW.format(name="mine") + "print('loaded')\n")
    assert load_flow(str(path)) is load_flow(f"{path}::mine")


def test_the_present_text_of_a_file_is_loaded_also_after_two_saves_within_a_second(write):
    """Python's compiled files know only the size and the second of a save."""
    for name in ("one", "two"):
        path = write(FLOW.format(name=name))
        os.utime(path, (1, 1))
        load.cache_clear()
        assert load_flow(str(path)).name == name
    assert [each.name for each in path.parent.iterdir()] == ["mine.py"]


def test_a_text_is_loaded_without_reading_its_file(write, tmp_path):
    path, text = (
        write("raise RuntimeError('this file is not to be read')\n"),
        FLOW.format(name="mine") + "beside = __file__\n",
    )
    module = load_text(path, text)
    assert module.mine.name == "mine"
    assert module.beside == str(path)
    assert load_text(path, text) is module
    assert [each.name for each in tmp_path.iterdir()] == ["mine.py"]
    with pytest.raises(FlowError, match=r"mine\.py:1: the file cannot be loaded: ZeroDivisionError"):
        load_text(path, "1 / 0\n")


def test_an_installed_algorithm_is_the_imported_module():
    from rlflow.algorithms.ppo import ppo

    assert load_flow("ppo") is ppo
    assert load_flow("algorithms/ppo.py") is ppo


def test_files_next_to_a_flow_are_importable(write):
    write("MEANING = 42\n", "rlflow_test_neighbour.py")
    path = write("from rlflow_test_neighbour import MEANING\n" + FLOW.format(name="mine"))
    assert load_flow(str(path)).function.__globals__["MEANING"] == 42


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path, write):
    (tmp_path / "other").mkdir()
    one, two = write(FLOW.format(name="one")), write(FLOW.format(name="two"), "other/mine.py")
    assert (load_flow(str(one)).name, load_flow(str(two)).name) == ("one", "two")


def test_imported_flows_and_aliases_do_not_count(write):
    path = write("from rlflow.algorithms.ppo import ppo\n" + FLOW.format(name="mine") + "alias = mine\n")
    assert load_flow(str(path)).name == "mine"


def test_two_flows_with_one_function_name_count_as_two(write):
    made = "def make():\n    @flow\n    def same(prompts): ...\n    return same\n"
    path = write(f"from rlflow import flow\n\n{made}\none, two = make(), make()\n")
    with pytest.raises(FlowError, match="the file defines 2 flows"):
        load_flow(str(path))
    assert load_flow(f"{path}::one") is not load_flow(f"{path}::two")


def test_any_suffix_is_accepted(write):
    assert load_flow(str(write(FLOW.format(name="mine"), "mine.txt"))).name == "mine"


def test_a_file_is_read_again_after_an_exception(write):
    path = write("1 / 0\n")
    with pytest.raises(FlowError, match="ZeroDivisionError"):
        load(path)
    path.write_text(FLOW.format(name="mine"))
    assert load_flow(str(path)).name == "mine"


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "noise.py"
    path.write_bytes(b"\xff\x00\x9c")
    with pytest.raises(FlowError, match="cannot be loaded"):
        load(path)


@pytest.mark.parametrize(
    ("name", "found"), [("nowhere.py", "nothing there"), ("tests", "a folder"), ("ppoo", "nothing there")]
)
def test_a_missing_target_is_a_plan_error(name, found):
    with pytest.raises(PlanError) as caught:
        target(name)
    assert caught.value.problems[0].found == found
    assert caught.value.problems[0].remedy


def test_the_nearest_file_of_the_folder_is_named(write):
    path = write(FLOW.format(name="mine"))
    with pytest.raises(PlanError) as caught:
        target(str(path.with_name("mien.py")))
    assert caught.value.problems[0].nearest == str(path)
