"""The campaign of faults finds the tests whose parts it uses."""

import ast
from pathlib import Path

from sources import TESTS, source


def test_the_folders_of_tests_that_the_campaign_uses_are_there():
    tree = source(Path("benchmarks/chaos.py")).tree
    [shared] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and "SHARED" in ast.unparse(node.targets)
    ]
    assert [folder for folder in ast.literal_eval(shared) if not (TESTS / folder).is_dir()] == []
