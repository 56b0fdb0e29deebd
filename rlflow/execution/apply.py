"""Run a stage on a batch: pass padded tensors, check what the stage returns, and store it as columns."""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import DTYPES, Batch, Data
from rlflow.author.columns import Kind, Level
from rlflow.author.dispatch import ALL, DP_COMPUTE
from rlflow.author.messages import fault, is_messages, packed, without_invalid_characters
from rlflow.author.seeds import derived, generator, row_seeds
from rlflow.author.stage import Stage
from rlflow.errors import FlowError, Place, PlanError, RemoteError, SkipIteration, StageError, Stopped, listed
from rlflow.execution.tally import Label, PartialMetric, as_kind, merged
from rlflow.processes.user_frames import own_lines

# rlflow's own folder; a line in it is never reported as the user's line
_ROOT = str(Path(__file__).parents[1])
# parts of PyTorch error messages, also in errors from workers
NO_MEMORY = ("OutOfMemoryError", "DefaultCPUAllocator: can't allocate memory")
LESS_MEMORY = (
    "remedy: process fewer tokens at once with --ROLE.micro_tokens (trainer) and --ROLE.batch_tokens (generator); "
    "or set --ROLE.gradient_checkpointing true; or set --memory, which offloads models that are not in use"
)


def apply_stage(
    stage: Stage, batch: Batch, settings: Mapping[str, Any], seed: int, trainer: Any = None
) -> tuple[Batch, dict[Label, PartialMetric]]:
    """Run a stage on a batch and return its output columns, under their declared names, and its metrics.

    ``batch``: the columns that the stage reads, except that optional ones may be missing. ``seed``: the seed
    of this call, for stages that draw random numbers. ``trainer``: the trainer of the stage's role, if it has
    one. Raises ValueError, stating what was expected and what was found, if a result doesn't match the
    stage's declaration.
    """
    if stage.dispatch.split is None or stage.dispatch.merge is None:
        return apply_piece(stage, batch, settings, seed, trainer)
    pieces = [apply_piece(stage, part, settings, seed, trainer) for part in stage.dispatch.split(batch, 1)]
    return merge_pieces(stage, [columns for columns, _ in pieces], batch), merged(
        [metrics for _, metrics in pieces]
    )


def merge_pieces(stage: Stage, outputs: list[Batch], batch: Batch) -> Batch:
    """Merge the outputs of the ranks with the ``merge`` function of a registered dispatch mode.

    ``batch``: the rows that were split. Raises ValueError if rows or columns are missing.
    """
    assert stage.dispatch.merge is not None
    whole = stage.dispatch.merge(outputs, batch)
    if len(whole) != len(batch) or set(whole.data) != set(stage.gives):
        raise ValueError(
            f"dispatch {stage.dispatch}: found {len(whole)} rows of {listed(whole.data)}, expected "
            f"{len(batch)} of {listed(stage.gives)}"
        )
    return Batch(batch.axis, {name: whole.data[name] for name in stage.gives})


def apply_piece(
    stage: Stage, batch: Batch, settings: Mapping[str, Any], seed: int, trainer: Any = None
) -> tuple[Batch, dict[Label, PartialMetric]]:
    """Call the stage's function once, with all rows of a batch. Return its columns and metrics."""
    columns = [(batch[name] if name in batch else None) for name in stage.signature.column_names]  # noqa: SIM401
    settings = dict(settings)
    if stage.draws:
        settings["generator"] = _generators(stage, batch, seed)
    first = [trainer] if stage.on else []
    values, metrics = split_metrics(stage.function(*first, *columns, **settings), len(stage.gives))
    if len(values) != len(stage.gives):
        raise ValueError(f"found {len(values)} results, expected {len(stage.gives)}: {listed(stage.gives)}")
    texts = [
        without_invalid_characters(value) if kind is None or kind.level is Level.TEXT else (value, 0)
        for kind, value in zip(stage.gives.values(), values, strict=True)
    ]
    named = zip(stage.gives.items(), texts, strict=True)
    data = {
        name: as_column(name, kind, value, batch, stage.dispatch == ALL) for (name, kind), (value, _) in named
    }
    replaced = sum(count for _, count in texts)
    tallies: dict[Label, PartialMetric] = {
        name: metric(name, value, batch) for name, value in metrics.items()
    }
    if replaced:
        tallies["replaced"] = PartialMetric.sum(float(replaced))
    return Batch(batch.axis, data), tallies


def _generators(stage: Stage, batch: Batch, seed: int) -> Any:
    """Return a single generator if the stage gets all rows, or a tuple with one generator per row.

    Rows that may be spread over several ranks get a generator each.
    """
    if stage.dispatch == DP_COMPUTE:
        return tuple(generator(s) for s in row_seeds(seed, batch.axis.keys))
    first = batch.axis.keys[0].tolist() if len(batch) else [0, 0]
    return generator(derived(seed, *first))


def split_metrics(result: Any, count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split what a stage returned into a tuple of values and a dict of metrics.

    ``count``: the number of columns that the stage declares. Metrics are optional and come last.
    """
    values = result if isinstance(result, tuple) else (result,)
    metrics = values[-1] if values and isinstance(values[-1], dict) else {}
    values = values[:-1] if values and isinstance(values[-1], dict) else values
    return (() if count == 0 and values == (None,) else values), metrics


def as_column(name: str, kind: Kind | None, value: Any, batch: Batch, every_rank: bool = False) -> Data:
    """Convert a value returned by a stage to a column.

    ``kind``: the declared kind, or None to infer it from the value. ``every_rank``: True if the stage runs on
    every rank. Raises ValueError if the shape, dtype or text is wrong.
    """
    if value is None:
        raise ValueError(f"column '{name}': found None, expected {kind or 'a tensor'}")
    kind = kind or _inferred_kind(name, value, batch.axis, token_lengths(batch))
    lengths = token_lengths(batch, Level.PROMPT if kind.level is Level.PROMPT else Level.TOKEN)
    if kind.level is Level.TEXT:
        return _text(name, kind, value, len(batch))
    tensor = _on_cpu(value)
    expected = _shape(kind.level, batch.axis, lengths)
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"column '{name}': found shape {list(tensor.shape)}, expected {list(expected)} "
            f"({kind.level.value} level)"
        )
    tensor = _converted(name, kind, tensor)
    kind = _kind_of(kind.level, tensor.dtype)
    if kind.level is Level.SCALAR:
        return Data(kind, (tensor,) if every_rank else tensor)
    if kind.level is Level.GROUP and not _equal_in_groups(tensor, batch.axis):
        raise ValueError(f"column '{name}': found different values within a group, expected equal ones")
    return Data.trimmed(kind, tensor, batch.axis, lengths)


def _on_cpu(value: Any) -> Tensor:
    """Return the value as a CPU tensor without autograd."""
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if tensor.is_cpu else tensor.cpu()


@functools.cache
def _kind_of(level: Level, dtype: torch.dtype) -> Kind:
    return Kind(level, str(dtype).removeprefix("torch."))


def token_lengths(batch: Batch, level: Level = Level.TOKEN) -> Tensor | None:
    """Return the row lengths of a batch's token columns, or of its prompt columns if ``level`` says so.

    The lengths are int64 [rows], or None if the batch has no such column.
    """
    return next((data.lengths for data in batch.data.values() if data.kind.level is level), None)


def _shape(level: Level, axis: Axis, lengths: Tensor | None) -> tuple[int, ...]:
    if level is Level.SCALAR:
        return ()
    if level in (Level.ROW, Level.GROUP):
        return (len(axis),)
    if lengths is None:
        raise ValueError(
            f"a stage that gives {level.value} columns must also read one, which sets the length of each row"
        )
    return (len(axis), int(lengths.max()) if len(lengths) else 0)


def _inferred_kind(name: str, value: Any, axis: Axis, lengths: Tensor | None) -> Kind:
    """Infer the kind of an undeclared column from its first value."""
    if isinstance(value, list | tuple) and all(isinstance(item, str) or is_messages(item) for item in value):
        return Kind(Level.TEXT)
    tensor = torch.as_tensor(value)
    if tensor.ndim == 0:
        return Kind(Level.SCALAR)
    if tensor.ndim == 1 and len(tensor) == len(axis):
        return Kind(Level.ROW)
    if tensor.ndim == 2 and lengths is not None and len(tensor) == len(axis):
        return Kind(Level.TOKEN)
    raise ValueError(
        f"column '{name}': found shape {list(tensor.shape)}, expected one value, {len(axis)} rows, or "
        "rows × tokens"
    )


def _text(name: str, kind: Kind, value: Any, rows: int) -> Data:
    if not isinstance(value, list | tuple) or len(value) != rows:
        size = f"{len(value)} items" if isinstance(value, list | tuple) else type(value).__name__
        raise ValueError(f"column '{name}': found {size}, expected {rows} strings")
    return Data(kind, tuple(_string(name, row, item) for row, item in enumerate(value)))


def _string(name: str, row: int, item: Any) -> str:
    """Return a string unchanged, and pack messages into a string. Raises ValueError for anything else."""
    if isinstance(item, str):
        return item
    if is_messages(item):
        return packed(item)
    wrong = next((each for each in item if fault(each)), item) if isinstance(item, list | tuple) else item
    why = f" ({fault(wrong)})" if isinstance(wrong, Mapping) else ""
    raise ValueError(
        f"column '{name}': found {repr(wrong)[:80]} in row {row}{why}, expected a string, or messages: "
        "[{'role': 'user', 'content': '…'}, …]"
    )


def _converted(name: str, kind: Kind, tensor: Tensor) -> Tensor:
    """Convert a tensor to the standard dtype of its family. float64 is kept, because the author chose it.

    Raises ValueError if the tensor's dtype family isn't that of the column.
    """
    actual = _kind_of(kind.level, tensor.dtype)
    if kind.family is not None and actual.family != kind.family:
        raise ValueError(f"column '{name}': found dtype {actual.dtype}, expected {kind.dtype}")
    if actual.dtype == "float64" or actual.family not in DTYPES:
        return tensor
    dtype = DTYPES[actual.family or ""]
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _equal_in_groups(tensor: Tensor, axis: Axis) -> bool:
    heads = tensor[axis.heads][axis.slots] if len(axis) else tensor
    return bool(torch.all((tensor == heads) | (tensor != tensor) & (heads != heads)))


def metric(name: str, value: Any, batch: Batch) -> PartialMetric:
    """Reduce the values of a stage's metric to their mean, or their maximum if ``name`` ends in ``_max``.

    NaNs are skipped. Of values per token, only those under the mask count.
    """
    tensor = torch.as_tensor(value).detach().cpu().double()
    return PartialMetric.of(tensor[_counted(name, tensor, batch)], as_kind(name))


def _counted(name: str, value: Tensor, batch: Batch) -> Tensor:
    """Return a bool mask of the values that count toward a metric.

    Of values per token, these are the ones under the batch's mask, or all of them if it has no mask.
    """
    lengths = token_lengths(batch)
    if value.ndim < 2 or lengths is None:
        return torch.ones_like(value, dtype=torch.bool)
    mask = (
        batch["mask"]
        if "mask" in batch
        else torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]
    )
    if value.shape != mask.shape:
        raise ValueError(
            f"metric '{name}': found shape {list(value.shape)}, expected {list(mask.shape)}, one value "
            "per row, or one value"
        )
    return torch.as_tensor(mask)


@contextlib.contextmanager
def failing(stage: str, iteration: int, batch: Batch, place: Place | None = None) -> Iterator[None]:
    """Return a context manager that turns an exception raised by a stage into a StageError.

    The StageError gives the stage, the iteration, the number of rows and the shapes, and has the exception as
    its cause. SystemExit and the like are converted too, but KeyboardInterrupt in the main thread isn't.
    """
    try:
        yield
    except PlanError as error:
        raise error.at(place) from error.__cause__
    except (FlowError, StageError, SkipIteration, Stopped):
        raise
    except RemoteError as error:
        message = with_remedy(str(error))
        raise StageError(
            stage, iteration, len(batch), message, place, shapes(batch), lines=error.lines
        ) from error
    except Exception as error:
        message = with_remedy(f"{type(error).__name__}: {error}")
        raise StageError(
            stage, iteration, len(batch), message, place, shapes(batch), lines=own_lines(error)
        ) from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise StageError(stage, iteration, len(batch), ending(error), place, shapes(batch)) from error


def with_remedy(message: str) -> str:
    """Return an error message, with advice added if a model ran out of memory."""
    return f"{message}\n  {LESS_MEMORY}" if any(text in message for text in NO_MEMORY) else message


def ending(error: BaseException) -> str:
    """Describe an exception such as SystemExit that a stage raised, with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_ROOT)] or frames
    where = f" (raised by {Place(own[-1].filename, own[-1].lineno or 1)})" if own else ""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"{text}{where}; a stage must not end the process: raise an error or return"


def shapes(batch: Batch) -> dict[str, str]:
    """Return the kind and the padded shape of each column as text, for messages."""
    return {name: f"{data.kind} {_size(data, batch.axis)}" for name, data in batch.data.items()}


def _size(data: Data, axis: Axis) -> str:
    if data.ragged:
        return str([len(axis), max(data.row_lengths.tolist(), default=0)])
    return str([] if data.kind.level is Level.SCALAR else [len(axis)])
