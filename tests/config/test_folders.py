"""Model folders that flags name."""

import pytest

from rlflow.config.folders import check_model_folders, model_folder
from rlflow.errors import PlanError


def test_a_folder_with_a_configuration_is_one_of_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == tmp_path


def test_another_is_refused_with_the_nearest_beside_it(tmp_path):
    (tmp_path / "qwen3").mkdir()
    (tmp_path / "qwen3" / "config.json").write_text("{}")
    with pytest.raises(PlanError) as caught:
        model_folder(str(tmp_path / "qwen33"))
    (problem,) = caught.value.problems
    assert (problem.code, problem.nearest) == ("model-folder", str(tmp_path / "qwen3"))


def test_a_name_of_the_hub_is_told_how_it_is_fetched():
    with pytest.raises(PlanError, match="hf download Qwen/Qwen3-0.6B --local-dir FOLDER"):
        model_folder("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"model": "nowhere"}, "--model"),
        ({"critic.model": "nowhere"}, "--critic.model"),
    ],
)
def test_flags_are_looked_at_by_name(values, flag):
    with pytest.raises(PlanError, match=f"with {flag};"):
        check_model_folders(values)


@pytest.mark.parametrize(
    "values", [{}, {"hp.model": "nowhere"}, {"data.model": "nowhere"}, {"model": None}, {"reward": "nowhere"}]
)
def test_what_is_no_model_of_a_role_is_left_alone(values):
    check_model_folders(values)
