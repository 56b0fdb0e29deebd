"""Read model folders: configs, tokenizers, and weights as safetensors, without running code from the folder
or unpickling anything.

rlflow loads configs, tokenizers and models only through this module, because transformers' defaults are
unsafe. By default, it runs Python files that a config names under ``auto_map`` if a user answers y on
standard input, it unpickles weights if there are no safetensors, and it fetches and runs any attention kernel
that a config names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlflow.errors import PlanError, listed

CONFIG, TOKENIZER, ADAPTERS = "config.json", "tokenizer_config.json", "adapter_config.json"
GENERATION, VOCABULARY, ADDED = "generation_config.json", "tokenizer.json", "added_tokens.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TEMPLATE, TEMPLATES, TOKENS = "chat_template.jinja", "additional_chat_templates", "special_tokens_map.json"
# names of chat templates if a tokenizer has several
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# keys of a tokenizer config with which newer and older versions of transformers parse responses
PARSERS = ("response_template", "response_schema")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_config(folder: Path, **options: Any) -> Any:
    """Load a model folder's config with transformers, passing on ``options``. Raises PlanError if ``check``
    refuses the folder, or if the model needs code from it."""
    from transformers import AutoConfig

    check(folder)
    refuse_folder_code()
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:
        if refused := _wants_code(folder, CONFIG, "AutoConfig", error):
            raise refused from error
        raise


class Boundary(NamedTuple):
    """The row length at which a model's rotary frequencies change.

    If any row of a batch has more than ``tokens`` tokens, all rows of the batch get different frequencies. If
    ``grows``, every longer row changes them again.
    """

    tokens: int
    grows: bool

    def reach(self, longest: int) -> int | None:
        """Return the largest row length that has the same frequencies as a batch whose longest row has
        ``longest`` tokens, or None if there's no limit."""
        if longest <= self.tokens:
            return self.tokens
        return longest if self.grows else None


def length_boundaries(config: Any) -> dict[str | None, Boundary]:
    """For each kind of layer, return the row length at which its rotary frequencies change. The key None
    stands for all layers.

    Only the rope types longrope and dynamic have such a boundary. The result is empty if the model's
    frequencies never change.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        return {}
    kinds = (
        {None: rope}
        if "rope_type" in rope
        else {kind: own for kind, own in rope.items() if isinstance(own, dict)}
    )
    boundaries = {kind: _boundary(text, own) for kind, own in kinds.items()}
    return {kind: boundary for kind, boundary in boundaries.items() if boundary is not None}


def _boundary(config: Any, rope: dict[str, Any]) -> Boundary | None:
    kind = str(rope.get("rope_type"))
    if kind == "longrope":
        return Boundary(int(rope["original_max_position_embeddings"]), grows=False)
    return Boundary(int(config.max_position_embeddings), grows=True) if "dynamic" in kind else None


def read_tokenizer(folder: Path) -> Any:
    """Load a model folder's tokenizer. Raises PlanError if it needs code from the folder; other errors from
    transformers are passed through."""
    from transformers import AutoTokenizer

    refuse_folder_code()
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if refused := _wants_code(folder, TOKENIZER, "AutoTokenizer", error):
            raise refused from error
        raise


def read_generation_config(folder: Path) -> Any:
    """Return a model folder's generation config, with its end tokens and sampling defaults."""
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def read_model(kind: Any, folder: Path, **options: Any) -> Any:
    """Load a model of the Auto class ``kind``, such as AutoModelForCausalLM, passing ``options`` on to
    ``from_pretrained``.

    With ``output_loading_info``, returns the model and the loading information as a pair. Raises PlanError if
    ``check`` refuses the folder, or if the model needs code from it.
    """
    check(folder)
    refuse_folder_code()
    try:
        return kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, **options
        )
    except Exception as error:
        if refused := _wants_code(folder, CONFIG, kind.__name__, error):
            raise refused from error
        raise


def empty_model(kind: Any, config: Any, dtype: Any) -> Any:
    """Create a model of the Auto class ``kind`` from a config, with random weights. Nothing is loaded."""
    refuse_folder_code()
    return kind.from_config(config, dtype=dtype, trust_remote_code=False)


def read_templates(folder: Path) -> dict[str, str]:
    """Return chat templates by name, without loading the tokenizer. As in transformers, template files take
    precedence over the tokenizer config. A template without a name is called "default"."""
    files = {"default": folder / TEMPLATE} | {
        path.stem: path for path in sorted((folder / TEMPLATES).glob("*.jinja"))
    }
    texts = {
        name: path.read_bytes().decode(errors="replace") for name, path in files.items() if path.is_file()
    }
    own = read_object(folder / TOKENIZER).get("chat_template")
    if isinstance(own, list):
        own = {str(entry.get("name")): entry.get("template") for entry in own if isinstance(entry, dict)}
    entries = own if isinstance(own, dict) else {"default": own}
    return texts or {name: text for name, text in entries.items() if isinstance(text, str)}


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens by name, such as ``eos_token``, from the folder's files. The usual names are
    always present, with empty text if the files don't define them.

    The tokenizer's class, which may define more tokens, isn't loaded.
    """
    named = {**read_object(folder / TOKENS), **read_object(folder / TOKENIZER)}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in named.items()
        if name.endswith("_token")
    }
    return dict.fromkeys(SPECIAL, "") | {name: text for name, text in texts.items() if isinstance(text, str)}


def read_added_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of added tokens, including control tokens, by their text, from the folder's files. The
    tokenizer's class, which may define more tokens, isn't loaded."""
    decoder = read_object(folder / TOKENIZER).get("added_tokens_decoder")
    listed = read_object(folder / VOCABULARY).get("added_tokens")
    named = decoder if isinstance(decoder, dict) else {}
    entries = [{"id": number, **entry} for number, entry in named.items() if isinstance(entry, dict)]
    entries += [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    tokens = {
        str(entry.get("content")): int(entry["id"]) for entry in entries if str(entry.get("id")).isdecimal()
    }
    own = {text: number for text, number in read_object(folder / ADDED).items() if isinstance(number, int)}
    return {text: number for text, number in {**own, **tokens}.items() if text.strip()}


def read_tokenizer_file(folder: Path) -> dict[str, Any]:
    """Return the contents of tokenizer.json, or an empty object if there is no such file. No tokenizer is
    created."""
    return read_object(folder / VOCABULARY)


def read_vocabulary_size(folder: Path) -> int | None:
    """Return ``vocab_size`` from the config, or None if it isn't there and the size is up to the model's
    class."""
    config = read_object(folder / CONFIG)
    sizes = (part.get("vocab_size") for part in (config.get("text_config"), config) if isinstance(part, dict))
    return next((size for size in sizes if isinstance(size, int)), None)


def read_end_tokens(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the ids of end tokens by file, for the generation config and the config. If neither names an end
    token, the config's entry has the default of the model's class in transformers."""
    config = read_object(folder / CONFIG)
    parts: dict[str, list[Any]] = {
        GENERATION: [read_object(folder / GENERATION)],
        CONFIG: [config, config.get("text_config")],
    }
    named = {
        name: tuple(
            dict.fromkeys(_numbers(part.get("eos_token_id") for part in own if isinstance(part, dict)))
        )
        for name, own in parts.items()
    }
    return named if any(named.values()) or not config else {**named, CONFIG: _given(folder)}


def _given(folder: Path) -> tuple[int, ...]:
    """Return the default end tokens of the model's class, or () if the config can't be loaded."""
    try:
        config = read_config(folder)
    except Exception:  # loading the model reports the error
        return ()
    return tuple(
        dict.fromkeys(
            _numbers(getattr(each, "eos_token_id", None) for each in (config, config.get_text_config()))
        )
    )


def _numbers(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        yield from (
            number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)
        )


def parses_responses(folder: Path) -> bool:
    """Return True if the folder's tokenizer defines how to parse responses."""
    own = read_object(folder / TOKENIZER)
    return any(own.get(name) for name in PARSERS)


def refuse_folder_code() -> None:
    """Make transformers refuse code from model folders in this process. Otherwise, it asks on standard input
    whether to run the code."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


def check(folder: Path) -> None:
    """Check a model folder before anything is loaded.

    Raises PlanError if a config is damaged or names code to fetch, if the model needs code from the folder,
    or if the weights are pickles or an adapter.
    """
    from transformers import CONFIG_MAPPING

    for file in (folder / name for name in (CONFIG, GENERATION)):
        if file.exists() and not isinstance(_parsed(file), dict):
            raise PlanError.of(
                "model-config",
                f"the file {file.name} of the model folder '{folder}' is damaged",
                found="no JSON object",
                expected="an object with settings",
                remedy=f"restore {file}, or name another folder",
            )
    if str(read_object(folder / CONFIG).get("model_type")) not in CONFIG_MAPPING and (
        refused := _code(folder, CONFIG, "AutoConfig")
    ):
        raise refused
    if (folder / ADAPTERS).is_file():
        raise PlanError.of(
            "model-adapter",
            f"the model folder '{folder}' contains an adapter",
            found=ADAPTERS,
            expected="a model's own weights",
            remedy="merge them once with peft: "
            "AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(NEW)",
        )
    fetched = [
        f"{name}: {value}"
        for name, value in _entries(read_object(folder / CONFIG))
        if name.endswith("implementation") and any("/" in text for text in _texts(value))
    ]
    if fetched:
        raise PlanError.of(
            "model-kernel",
            f"the config of '{folder}' names code to fetch and run",
            found=listed(fetched),
            expected="an attention implementation of an installed package, such as sdpa",
            remedy=f"remove that line from {folder / CONFIG}",
        )
    _check_weights(folder)


def _check_weights(folder: Path) -> None:
    """Raise PlanError if the folder's only weights are pickles. If there are no weights at all, transformers
    reports this later."""
    named = [
        text for _, value in _entries(read_object(folder / INDEX).get("weight_map")) for text in _texts(value)
    ]
    # an index file may name pickles
    elsewhere = sorted({name for name in named if not name.endswith(".safetensors")})
    readable = (folder / WEIGHTS).is_file() or ((folder / INDEX).is_file() and not elsewhere)
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
    if not readable and (pickles or elsewhere):
        raise PlanError.of(
            "model-pickles",
            f"the model folder '{folder}' has no weights that can be loaded without running code",
            found=listed(elsewhere or pickles),
            expected="weights as safetensors",
            remedy=_conversion(folder),
        )


def _conversion(folder: Path) -> str:
    """Return a remedy with a command that converts pickled weights to safetensors. Since it unpickles them,
    the text says to run it only on folders that the user trusts."""
    names = read_object(folder / CONFIG).get("architectures")
    scores = isinstance(names, list) and any(
        str(name).endswith("ForSequenceClassification") for name in names
    )
    kind = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    return (
        'use a folder with safetensors, or, if you trust this one, convert it once: python -c "import '
        "transformers as t; "
        f"[k.from_pretrained('{folder}').save_pretrained('{folder}-safe') for k in (t.{kind}, "
        't.AutoTokenizer)]"'
    )


def named_code(folder: Path) -> list[str]:
    """Return the Python code named by the folder's configs, such as ``AutoConfig: modeling.OwnConfig``. It
    may be in the folder or elsewhere. Models that transformers supports don't need it."""
    places = [
        f"{name}: {', '.join(_texts(value))}"
        for file in (CONFIG, TOKENIZER)
        for name, value in _mapped(folder / file)
    ]
    return list(dict.fromkeys(places))


def _mapped(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (Auto class, code) for each entry of a config file's ``auto_map``, which is a list in older
    tokenizer configs."""
    own = read_object(file).get("auto_map")
    yield from own.items() if isinstance(own, dict) else [("AutoTokenizer", own)] if own else []


def _wants_code(folder: Path, file: str, kind: str, error: Exception) -> PlanError | None:
    """Return the PlanError to raise if loading failed because the model needs code from the folder, or None
    if the folder names no code for the Auto class ``kind``."""
    return None if isinstance(error, PlanError | OSError) else _code(folder, file, kind)


def _code(folder: Path, file: str, kind: str) -> PlanError | None:
    """Return the PlanError for code that the folder names for the Auto class ``kind``, or None if there is
    none."""
    named = [f"{kind}: {', '.join(_texts(value))}" for name, value in _mapped(folder / file) if name == kind]
    if not named:
        return None
    return PlanError.of(
        "model-code",
        f"the model folder '{folder}' needs its own Python code, and rlflow never runs code of a model folder",
        found=f"auto_map in {file}: {listed(named)}",
        expected="a model that the installed transformers supports",
        remedy="install a newer transformers if that supports it; else name another folder with --model",
    )


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. A file that is missing, is damaged or holds another JSON value gives
    an empty object, because other checks report damaged files."""
    content = _parsed(file)
    return content if isinstance(content, dict) else {}


def _parsed(file: Path) -> Any:
    """Return the JSON value in a file, or None if the file is missing or can't be parsed."""
    try:
        return json.loads(file.read_bytes()) if file.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the key and value of each entry of a JSON object and of all objects nested in it."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield from one.items()
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()


def _texts(value: Any) -> list[str]:
    """Return the strings in ``value``: the value itself, or the items of a list or object."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
    return [item for item in inner if isinstance(item, str)]
