"""`rlflow new` and `rlflow import`.

`rlflow new` writes a file to start an algorithm from, and `rlflow import` turns another project's settings
into a configuration file.
"""

from __future__ import annotations

import ast
import keyword
import os
import re
import sys
from pathlib import Path

from rlflow import algorithms
from rlflow.checkpoints import durable
from rlflow.errors import PlanError, listed, nearest, printable

TEMPLATE = '''"""{title}: describe the algorithm in one sentence, and name its paper."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import flow, group_mean, loss, stage


@dataclass(frozen=True)
class Settings:  # each field is a flag of `rlflow run`: --hp.clip 0.1
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 256  # longest response
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    minibatch: Annotated[int, Ge(1)] = 64  # rows per optimizer step


# A stage is a function of columns. Its positional parameters name the columns that it reads; keyword-only parameters are settings.
# Columns are tensors padded to the longest row: tokens [rows, T], scores [rows]. rows="group": all samples of a prompt are in one call.
@stage(gives="advantages", rows="group")
def advantages(scores, group, mask):
    advantage = scores - group_mean(scores, group)  # NaN marks a missing score: the update skips such rows
    return torch.where(mask, advantage[:, None], 0.0)


# A loss gets the model's present outputs (new.logprobs) and columns. It returns one value per token (or per row) and metrics. The
# trainer averages the values over all tokens of the minibatch, unless `update(…, mean=…)` sets another average.
@loss
def policy_loss(new, logprobs, advantages, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -gain, {{"clipped": (ratio - 1).abs() > clip}}


# The flow is one iteration. Its first parameter is the data, `hp` the settings, and every other parameter a role. The calls on a role
# decide whether it is a reward, or a model that samples, scores or learns.
@flow
def {name}(prompts, actor, reward, hp=Settings()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)  # adds tokens, mask, completion, …
    batch |= reward(batch)  # adds scores
    batch |= actor.logprobs(batch)  # log-probs before the update: the old policy
    batch |= advantages(batch)
    actor.update(batch, policy_loss, clip=hp.clip, minibatch=hp.minibatch)
'''


def write_new(target: Path, source: str | None = None) -> int:
    """Write a template, or a copy of rlflow's algorithm ``source``, to the file ``target``. Returns 0.

    Raises PlanError if the file exists or can't be written, if its name isn't a valid Python name, or if
    there is no such algorithm.
    """
    path = target if target.suffix == ".py" else target.with_name(target.name + ".py")
    if not path.stem.isidentifier() or keyword.iskeyword(path.stem):
        raise PlanError.of(
            "new-name",
            f"'{path.stem}' cannot be the name of a flow",
            found=path.stem,
            expected="letters, digits and '_', not a Python keyword",
            remedy="choose another name",
        )
    text = (
        copied(source, path.stem)
        if source
        else TEMPLATE.format(name=path.stem, title=path.stem.replace("_", " ").capitalize())
    )
    write_file(path, text)
    print(f"wrote {path}\n  rlflow check {path}\n  rlflow run {path}")
    return 0


def write_file(path: Path, text: str) -> None:
    """Write a new file. Raises PlanError if it exists or can't be written."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise exists(path) from None
    except OSError as error:
        raise PlanError.of(
            "new-folder",
            f"'{path}' cannot be written",
            found=str(error.strerror),
            expected="an existing folder",
            remedy="create the folder first",
        ) from error


def exists(path: Path) -> PlanError:
    """Return the error for a file that already exists."""
    return PlanError.of(
        "new-exists",
        f"'{path}' already exists",
        found="a file",
        expected="a new name",
        remedy="choose another name",
    )


def copied(source: str, name: str) -> str:
    """Return the source of rlflow's algorithm ``source``, with its flow and settings renamed after ``name``.

    Raises PlanError if there is no such algorithm, or if its file already uses the new name for something
    else.
    """
    shipped = {
        path.stem: path for path in Path(algorithms.__path__[0]).glob("*.py") if path.stem != "__init__"
    }
    if source not in shipped:
        raise PlanError.of(
            "new-from",
            f"rlflow ships no algorithm '{source}'",
            found=source,
            expected=listed(sorted(shipped), len(shipped)),
            nearest=nearest(source, shipped),
            remedy="choose one of these algorithms, or omit --from",
        )
    text = shipped[source].read_text()
    flow = _flow_of(ast.parse(text))
    renames = {flow.name: name} | {settings: _class_name(name) for settings in _settings_of(flow)}
    occupied = sorted(
        {word for word in renames.values() if word not in renames} & set(re.findall(r"\w+", _code(text)))
    )
    if occupied:
        raise PlanError.of(
            "new-name",
            f"'{source}' already uses the name '{occupied[0]}' for something else",
            found=name,
            expected="an unused name",
            remedy="choose another name",
        )
    return _renamed(text, renames)


def _flow_of(tree: ast.Module) -> ast.FunctionDef:
    """Return the module's function with the flow decorator."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return next(
        node
        for node in functions
        if any("flow" in re.findall(r"\w+", ast.unparse(each))[:1] for each in node.decorator_list)
    )


def _settings_of(flow: ast.FunctionDef) -> list[str]:
    """Return [name of the class of a flow's default settings], or [] if it has no settings."""
    defaults = (*flow.args.defaults, *flow.args.kw_defaults)
    return [
        default.func.id
        for default in defaults
        if isinstance(default, ast.Call) and isinstance(default.func, ast.Name)
    ]


def _class_name(name: str) -> str:
    """Return the name for the settings class of a flow: ``my_own`` becomes ``MyOwn``.

    If that is also the flow's name, ``Settings`` is added.
    """
    words = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
    return words if words and words != name else f"{name}Settings"


def _code(text: str) -> str:
    """Return all names in a file's code in one string, without those in comments and strings."""
    words = (
        getattr(node, field, None)
        for node in ast.walk(ast.parse(text))
        for field in ("id", "arg", "attr", "name", "asname")
    )
    return " ".join(word for word in words if isinstance(word, str))


def _renamed(text: str, renames: dict[str, str]) -> str:
    """Return the text with names in its code replaced. Comments and docstrings stay the same."""
    lines = text.splitlines(keepends=True)
    places = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id in renames:
            places.append((node.lineno, node.col_offset, node.id))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in renames:
            places.append(
                (
                    node.lineno,
                    node.col_offset + len("def " if isinstance(node, ast.FunctionDef) else "class "),
                    node.name,
                )
            )
    for line, column, old in sorted(places, reverse=True):
        code = lines[line - 1].encode()
        lines[line - 1] = (code[:column] + renames[old].encode() + code[column + len(old) :]).decode()
    return "".join(lines)


LONGEST = 1 << 20  # maximum size of a file in bytes


def import_settings(project: str, file: Path, out: Path) -> int:
    """Turn another project's script or configuration into a configuration file, and report on every key.

    A key that changes the mathematics but has no counterpart becomes a comment in the file, with a warning.
    If a value can't be read or rlflow has no such algorithm, raises PlanError and writes nothing.
    """
    from rlflow.cli.importers import openrlhf, trl, verl

    projects = {"verl": verl, "openrlhf": openrlhf, "trl": trl}
    if project not in projects:
        raise PlanError.of(
            "import",
            f"settings of '{project}' cannot be imported",
            found=project,
            expected="verl, openrlhf or trl",
            nearest=nearest(project, projects),
            remedy="docs/moving.md lists the names of other projects' settings in rlflow",
        )
    _check_out(file, out)
    text = _text(file)
    settings = projects[project].imported(projects[project].read(text, str(file)))
    print(printable("\n".join(settings.report())))
    problems = [*settings.problems(str(file)), *filter(None, [settings.keys.unknown_release(text)])]
    if any(problem.severity == "error" for problem in problems):
        PlanError.refuse(problems)
    for warning in problems:
        print(printable(str(warning)), file=sys.stderr)
    durable.replace(out, settings.toml(str(out)).encode())
    print(f"wrote {printable(str(out))}: rlflow run {settings.flow} --config {printable(str(out))}")
    return 0


def _check_out(file: Path, out: Path) -> None:
    """Raise PlanError if ``out`` is the input file, or exists but isn't a regular file."""
    if out.exists() and (not out.is_file() or (file.exists() and out.samefile(file))):
        found = "the input file" if out.is_file() else "not a regular file"
        raise PlanError.of(
            "import",
            f"--out {out} cannot be written",
            found=found,
            expected="a new file, or a configuration file to replace",
            remedy="name another file with --out",
        )


def _text(file: Path) -> str:
    """Return the text of a file.

    Raises PlanError unless it is a readable regular file of at most LONGEST bytes.
    """
    expected = f"a script of at most {LONGEST >> 20} MiB; for verl and TRL also a .yaml"
    try:
        data = durable.read(Path(os.path.realpath(file)), LONGEST)
        if len(data) <= LONGEST:
            return data.decode()
        found = "a longer file"
    except (OSError, UnicodeDecodeError) as error:
        found = str(error)
    raise PlanError.of(
        "import",
        f"'{file}' cannot be read",
        found=found,
        expected=expected,
        remedy="name an existing file",
    )
