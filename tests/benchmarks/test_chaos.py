"""`benchmarks/chaos.py` finds the folders of tests whose modules it uses."""

import ast
from pathlib import Path

from sources import TESTS, source


def test_folders_of_shared_test_modules_exist():
    tree = source(Path("benchmarks/chaos.py")).tree
    [shared] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and "SHARED" in ast.unparse(node.targets)
    ]
    assert [folder for folder in ast.literal_eval(shared) if not (TESTS / folder).is_dir()] == []
