"""Model folders named by flags."""

import pytest

from rlflow.config.folders import check_model_folders, model_folder
from rlflow.errors import PlanError


def test_a_folder_with_a_configuration_is_a_model_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == tmp_path


def test_another_folder_is_refused_with_the_nearest_model_folder(tmp_path):
    (tmp_path / "qwen3").mkdir()
    (tmp_path / "qwen3" / "config.json").write_text("{}")
    with pytest.raises(PlanError) as caught:
        model_folder(str(tmp_path / "qwen33"))
    (problem,) = caught.value.problems
    assert (problem.code, problem.nearest) == ("model-folder", str(tmp_path / "qwen3"))


def test_a_name_on_the_hub_is_not_a_wrong_folder():
    check_model_folders({"model": "Qwen/Qwen3-0.6B"})
    with pytest.raises(PlanError, match="name a model on the Hub: OWNER/NAME"):
        model_folder("Qwen3-0.6B")


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"model": "nowhere"}, "--model"),
        ({"critic.model": "nowhere"}, "--critic.model"),
    ],
)
def test_flags_of_model_folders_are_checked_by_name(values, flag):
    with pytest.raises(PlanError, match=f"the path of {flag},"):
        check_model_folders(values)


@pytest.mark.parametrize(
    "values", [{}, {"hp.model": "nowhere"}, {"data.model": "nowhere"}, {"model": None}, {"reward": "nowhere"}]
)
def test_other_paths_are_not_checked(values):
    check_model_folders(values)
