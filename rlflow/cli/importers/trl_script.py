"""Read the settings of TRL's GRPOTrainer from a Python script without executing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError, listed

# positional parameters, in order
PARAMETERS = {
    "GRPOConfig": ("output_dir",),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "LoraConfig": ("task_type",),
}
# reward functions that TRL provides → the reward of rlflow, or what to do
OF_TRL = {"accuracy_reward": "math"}
Def = ast.FunctionDef | ast.AsyncFunctionDef
# Statements at the top level of a file that do nothing visible when the file is imported.
HARMLESS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)


# functions that only make a value
PURE = ("re.compile", "dict", "list", "set", "frozenset", "tuple", "os.environ.get", "os.getenv", "Path")


@dataclass(frozen=True)
class Unread:
    """A value that can't be read without executing the script."""

    text: str  # the expression
    line: int  # 0 in a YAML file
    why: str = "its value is known only when the script runs"

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line else ""
        return f"{self.text:.60}{where}: {self.why}"

    def __repr__(self) -> str:
        return self.text


def read(text: str, name: str) -> dict[str, Any]:
    """Return the settings in a script, by key. ``name``: the script's path.

    Keys of LoraConfig start with ``peft_config.``. A value that isn't a literal is an Unread. Raises
    PlanError if the script isn't valid Python or doesn't create exactly one GRPOTrainer.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _refused(name, "is not valid Python", str(error), "a script that Python can parse") from None
    return Script(tree, name).settings()


class Script:
    """A script that creates a GRPOTrainer."""

    def __init__(self, tree: ast.Module, name: str) -> None:
        self.tree, self.name = tree, name
        self.nodes = list(ast.walk(tree))
        self.values = dict(self._assigned())
        self.functions = {node.name: node for node in tree.body if isinstance(node, Def)}
        self.imports = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in self.nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def _assigned(self) -> Iterator[tuple[str, ast.expr | None]]:
        """Yield (name, value) for each variable. The value is None if it is assigned more than once."""
        seen: set[str] = set()
        for node in self.nodes:
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                names = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
                plain = isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign)
                for variable in names if not isinstance(target, ast.Attribute | ast.Subscript) else ():
                    yield variable, node.value if plain and variable not in seen else None  # type: ignore[union-attr]
                    seen.add(variable)

    def settings(self) -> dict[str, Any]:
        """Return all settings in the script, by key."""
        trainer = self._call("GRPOTrainer")
        if trainer is None:
            raise _refused(self.name, "builds no GRPOTrainer", listed(self._built()), "a call GRPOTrainer(…)")
        arguments = dict(self._arguments(trainer, "GRPOTrainer"))
        config = arguments.pop("args", None)
        adapter = arguments.pop("peft_config", None)
        settings = self._config(config)
        for key, node in arguments.items():
            match key:
                case "reward_funcs":
                    settings[key] = self._rewards(node)
                case "train_dataset" | "eval_dataset":
                    settings[key] = self._data(node)
                case _:
                    settings[key] = self._value(node)
        return settings | self._adapter(adapter)

    def _built(self) -> list[str]:
        """Return the names of the trainers that the script creates."""
        names = [_called(node) for node in self.nodes if isinstance(node, ast.Call)]
        return [name for name in names if name.endswith("Trainer")]

    def _call(self, name: str) -> ast.Call | None:
        calls = [node for node in self.nodes if isinstance(node, ast.Call) and _called(node) == name]
        if len(calls) > 1:
            lines = ", ".join(f"line {call.lineno}" for call in calls)
            raise _refused(self.name, f"builds several {name}s", lines, f"one {name}")
        return calls[0] if calls else None

    def _arguments(self, call: ast.Call, name: str) -> Iterator[tuple[str, ast.expr]]:
        yield from zip(PARAMETERS[name], call.args, strict=False)
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield keyword.arg, keyword.value
                continue
            pairs = _pairs(self._resolved(keyword.value))
            yield from pairs or [(f"**{ast.unparse(keyword.value)}", keyword.value)]

    def _config(self, node: ast.expr | None) -> dict[str, Any]:
        call = self._call("GRPOConfig")
        if call is None:
            if node is None:
                return {}
            return {
                "args": Unread(ast.unparse(node), node.lineno, "import the YAML of --config for its values")
            }
        settings = {key: self._value(value) for key, value in self._arguments(call, "GRPOConfig")}
        names = [variable for variable, value in self.values.items() if value is call]
        for each in self.nodes:  # training_args.KEY = VALUE
            target = each.targets[0] if isinstance(each, ast.Assign) else None
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) in names:
                settings[target.attr] = self._value(each.value)  # type: ignore[attr-defined]
        return settings

    def _adapter(self, node: ast.expr | None) -> dict[str, Any]:
        if node is None or self._literal(node) == (None,):
            return {}
        call = self._resolved(node)
        if not isinstance(call, ast.Call) or _called(call) != "LoraConfig":
            return {"peft_config": Unread(ast.unparse(node), node.lineno, "set --lora RANK, --lora-alpha")}
        keys = {
            f"peft_config.{key}": self._value(value) for key, value in self._arguments(call, "LoraConfig")
        }
        return {"peft_config.r": 8, **keys}

    def _resolved(self, node: ast.expr) -> ast.expr:
        """Return what a variable was assigned, if only once. Other expressions are returned unchanged."""
        for _ in range(8):
            if not isinstance(node, ast.Name) or self.values.get(node.id) is None:
                return node
            node = self.values[node.id] or node
        return node

    def _literal(self, node: ast.expr) -> tuple[Any] | None:
        """Return (value,) for a literal or ``dict(KEY=LITERAL)``, or None for any other expression."""
        node = self._resolved(node)
        if pairs := _pairs(node):
            values = {key: self._literal(value) for key, value in pairs}
            return (
                None
                if None in values.values()
                else ({key: value[0] for key, value in values.items() if value},)
            )
        try:
            return (ast.literal_eval(node),)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None

    def _value(self, node: ast.expr) -> Any:
        value = self._literal(node)
        if value is None:
            return Unread(ast.unparse(node), node.lineno)
        return list(value[0]) if isinstance(value[0], tuple | set) else value[0]

    def _data(self, node: ast.expr) -> Any:
        """Return a data set as ``NAME[:CONFIG][/SPLIT]`` if it comes straight from ``load_dataset``."""
        whole = node
        node, split = self._resolved(node), ""
        if isinstance(node, ast.Subscript) and (key := self._literal(node.slice)):
            node, split = self._resolved(node.value), str(key[0])
        if not isinstance(node, ast.Call) or _called(node) != "load_dataset":
            how = f"changed by the script: {ast.unparse(node)}"
            return Unread(
                ast.unparse(whole), whole.lineno, f"{how:.200}; write the result to a file for --data"
            )
        named = {keyword.arg: self._literal(keyword.value) for keyword in node.keywords}
        parts = [self._literal(argument) for argument in node.args]
        if not parts or None in parts or None in named.values() or named.keys() - {"split", "name"}:
            return Unread(ast.unparse(node), node.lineno, "write the data to a file for --data")
        config = named.get("name") or (parts[1] if len(parts) > 1 else None)
        split = str((named.get("split") or (split,))[0])
        return f"{parts[0][0]}{f':{config[0]}' if config else ''}{f'/{split}' if split else ''}"  # type: ignore[index]

    def _rewards(self, node: ast.expr) -> list[Any]:
        node = self._resolved(node)
        every = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        return [self._reward(each) for each in every]

    def _reward(self, node: ast.expr) -> Any:
        literal = self._literal(node)
        if literal and isinstance(literal[0], str):
            return literal[0]
        name = ast.unparse(node)
        if name in self.functions:
            effect = _effect(self.tree)
            if effect is None:
                return f"{self.name}:{name}"
            why = (
                f"importing the file executes line {effect}: move the function to a file of its own, --reward"
            )
            return Unread(name, node.lineno, f"{why} FILE.py:{name}")
        module, original = self.imports.get(name, ("", ""))
        if module.partition(".")[0] == "trl":
            return OF_TRL.get(original) or Unread(
                name,
                node.lineno,
                "a function of TRL: write a function that calls it, --reward FILE.py:FUNCTION",
            )
        file = Path(self.name).parent / f"{module.replace('.', '/')}.py"
        if module and file.is_file():
            return f"{file}:{original}"
        return Unread(
            name, node.lineno, "put the function at the top level of a file: --reward FILE.py:FUNCTION"
        )


def _pairs(node: ast.expr) -> list[tuple[str, ast.expr]]:
    """Return (key, value) for each entry of a dictionary in the script. Empty for any other expression."""
    if isinstance(node, ast.Call) and _called(node) == "dict" and not node.args:
        return [(keyword.arg or "**", keyword.value) for keyword in node.keywords]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return [(str(key.value), value) for key, value in zip(node.keys, node.values, strict=True)]  # type: ignore[union-attr]
    return []


def _called(call: ast.Call) -> str:
    """Return the name of the function that is called, without its module."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _effect(tree: ast.Module) -> int | None:
    """Return the line of the first statement that does more than define names on import, or None."""
    return next((node.lineno for node in tree.body if not _harmless(node)), None)


def _harmless(node: ast.stmt) -> bool:
    if isinstance(node, HARMLESS):
        return True
    if isinstance(node, ast.If):  # if __name__ == "__main__":
        test = ast.unparse(node.test).replace('"', "'")
        return test == "__name__ == '__main__'" and all(map(_harmless, node.orelse))
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        return all(ast.unparse(call.func) in PURE for call in calls)
    return False


def _refused(name: str, what: str, found: str, expected: str) -> PlanError:
    return PlanError.of(
        "import",
        f"'{name}' {what}",
        found=found,
        expected=expected,
        remedy="name a script that builds one GRPOTrainer, or a YAML for trl grpo --config",
    )


def unread(source: Mapping[str, Any]) -> dict[str, Unread]:
    """Return the settings that can't be read, by key."""
    return {key: value for key, value in source.items() if isinstance(value, Unread)}
