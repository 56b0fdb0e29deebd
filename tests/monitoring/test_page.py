"""A run in a notebook: its numbers and its curve; names and model text are escaped."""

import json
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.monitoring.page import HEIGHT, WIDTH, curve_svg, run_html

SVG = "{http://www.w3.org/2000/svg}"
VALUES = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(VALUES, min_size=1, max_size=30))
def test_every_point_is_inside_and_higher_values_are_higher(values):
    tree = ElementTree.fromstring(curve_svg(list(enumerate(values))))
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in tree.findall(f"{SVG}circle")]
    assert len(dots) == len(values)
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in dots)
    assert [x for x, _ in dots] == sorted(x for x, _ in dots)
    lowest, highest = values.index(min(values)), values.index(max(values))
    assert dots[highest][1] <= dots[lowest][1]


@pytest.mark.parametrize(
    ("lines", "metric"),
    [
        (
            [{"iteration": 0, "reward/mean": 0.1}, {"iteration": 1, "evaluation/sampled": 0.5}],
            "evaluation/sampled",
        ),
        ([{"iteration": 0, "reward/mean": 0.1}], "reward/mean"),
        ([], ""),
    ],
)
def test_a_run_shows_its_held_out_curve_or_its_reward(tmp_path, lines, metric):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = run_html(tmp_path, [("run", "<b>&</b>")])
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in page
    assert ("<svg" in page) == bool(metric)
    assert metric in page


def test_a_run_of_several_rewards_shows_the_curve_of_each(judged):
    page = run_html(judged("both", 0.25), [])
    assert [
        "reward/mean after iterations" in page,
        "style/mean after iterations" in page,
        page.count("<svg"),
    ] == [True, True, 2]
