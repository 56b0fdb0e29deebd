"""Count the statements of rlflow/ and backends/: `python benchmarks/statements.py [--at COMMIT] [--by]`.

A statement is an `ast.stmt` node at any depth. Docstrings are not counted. Unlike the number of lines, the
number of statements does not depend on the formatter or on comments.
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNTED = ("rlflow", "backends")
BENCHMARKS = ("rlflow", "bench")
"""Older commits have the suite of benchmarks in this folder of the package; it is not counted."""


def statements(source: str) -> int:
    """Count the statements of a module, without docstrings. Raises SyntaxError for invalid Python."""
    nodes = list(ast.walk(ast.parse(source)))
    written = sum(isinstance(node, ast.stmt) for node in nodes)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return written - sum(
        isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None for node in nodes
    )


def sources(commit: str) -> Iterator[tuple[Path, str]]:
    """Yield (path from the repository's root, text) of each module that is counted.

    ``commit``: the commit to read; empty for the working tree.
    """
    if commit:
        packed = subprocess.run(
            ("git", "-C", ROOT, "archive", commit, *COUNTED), check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            found = [
                (Path(member.name), archive.extractfile(member))
                for member in archive
                if member.name.endswith(".py")
            ]
            yield from ((path, file.read().decode()) for path, file in found if file is not None)
    else:
        yield from (
            (path.relative_to(ROOT), path.read_text())
            for folder in COUNTED
            for path in sorted((ROOT / folder).rglob("*.py"))
        )


def counted(commit: str = "") -> Counter[str]:
    """Return the number of statements in each folder below rlflow/, and in backends/."""
    count: Counter[str] = Counter()
    for path, text in sources(commit):
        if path.parts[:2] != BENCHMARKS:
            count["/".join(path.parts[:2]) if path.parts[0] == "rlflow" else path.parts[0]] += statements(
                text
            )
    return count


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--at",
        metavar="COMMIT",
        default="",
        help="count statements of this commit (default: the working tree)",
    )
    parser.add_argument("--by", action="store_true", help="print a line for each folder")
    chosen = parser.parse_args(arguments)
    count = counted(chosen.at)
    if chosen.by:
        print(*(f"{number:7,}  {folder}" for folder, number in count.most_common()), sep="\n")
    print(f"{count.total():7,}  statements")


if __name__ == "__main__":
    main(sys.argv[1:])
