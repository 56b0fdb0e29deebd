"""A reward for problems with tests: 1 if the code in the response passes all tests, 0 if it does not."""

import os
import re
import secrets

from rlflow import post

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

# The prompts of MBPP do not name the function. The tests therefore find the last function under the name that they call.
PROGRAM = """
import ast, builtins, types
space = {{"__name__": "solution"}}
exec({code!r}, space)
defined = [value for value in space.values() if isinstance(value, types.FunctionType)]
for node in ast.walk(ast.parse({tests!r})):
    if isinstance(node, ast.Name) and defined and not hasattr(builtins, node.id):
        space.setdefault(node.id, defined[-1])
exec({tests!r}, space)
print({word!r})
"""


def passed(completion: str, test_list: list[str], test_setup_code: str = "") -> float:
    blocks = BLOCK.findall(completion)
    if not blocks:
        return 0.0
    word = secrets.token_hex(16)  # printed after the tests: code that exits early does not pass
    tests = "\n".join([test_setup_code, *test_list])
    program = PROGRAM.format(code=blocks[-1], tests=tests, word=word)
    answer = post(os.environ["RLFLOW_SERVICE_SANDBOX"] + "/run_code", {"code": program, "language": "python"})
    return float(word in answer["run_result"]["stdout"])
