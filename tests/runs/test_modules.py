"""The imports of a file, read from its text."""

import pytest

from rlflow.runs.trust import imports, meaning


def write_files(folder, **files):
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.py".replace("init.py", "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def imports_of(folder, file, module=""):
    result = imports(folder / file, module)
    return sorted(path.relative_to(folder).as_posix() for path in result.files), sorted(result.outside)


def test_imports_from_the_same_folder_are_followed(tmp_path):
    write_files(
        tmp_path,
        one="import two, os.path\nfrom pack.inner import deep\nimport numpy as np",
        two="def f():\n    import three\n",
        three="from rlflow import stage\nimport one",
        four="",
        pack__init="from . import beside",
        pack__beside="",
        pack__inner__deep="from ..beside import x\nfrom ... import three",
    )
    files = ["pack/__init__.py", "pack/beside.py", "pack/inner/deep.py", "three.py", "two.py"]
    assert imports_of(tmp_path, "one.py") == (files, ["numpy", "rlflow"])
    assert imports_of(tmp_path, "four.py") == ([], [])


def test_a_neighbour_of_a_package_is_another_package(tmp_path):
    write_files(
        tmp_path,
        mine__init="",
        mine__judge="import numpy\nfrom mine.inner import a\nfrom .other import b",
        mine__inner="",
        mine__other="",
        numpy__init="import numpy.core",
        numpy__core="",
    )
    assert imports_of(tmp_path, "mine/judge.py", "mine.judge") == (
        ["mine/__init__.py", "mine/inner.py", "mine/other.py"],
        ["numpy"],
    )


def test_rlflow_next_to_a_file_is_identified_by_its_version(tmp_path):
    write_files(tmp_path, flow="from rlflow import flow", rlflow__init="")
    assert imports_of(tmp_path, "flow.py") == ([], ["rlflow"])


@pytest.mark.parametrize("content", ["def f(:", "\0", "(" * 500])
def test_a_file_that_is_not_python_imports_nothing(content, tmp_path):
    write_files(tmp_path, odd=content, other=content + " ")
    assert imports_of(tmp_path, "odd.py") == ([], [])
    assert meaning(tmp_path / "odd.py") != meaning(tmp_path / "other.py")


def test_comments_and_layout_do_not_matter(tmp_path):
    write_files(
        tmp_path, one="x = 1  # one\n\n\ny = [\n    2,\n]\n", two="x = 1\ny = [2]\n", three="x = 1\ny = [3]\n"
    )
    assert meaning(tmp_path / "one.py") == meaning(tmp_path / "two.py") != meaning(tmp_path / "three.py")
