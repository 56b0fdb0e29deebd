"""Run vLLM's engine in this process, one step at a time. In each step, rows grow by a token. Weights are
written between two steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.author.seeds import signed, uniforms_at
from rlflow.backends.local.sampling import inverse, truncated
from rlflow.backends.vllm import internals
from rlflow.backends.vllm.parallel import EngineRank
from rlflow.backends.vllm.settings import GeneratorSettings
from rlflow.backends.vllm.surroundings import imported, prepared
from rlflow.errors import PlanError, listed
from rlflow.training.protocols import ModelSpec, Sampling


def draw_by_row_seed(runner: Any) -> bool:
    """Make this model runner draw tokens as the local backend does, and return True. For vLLM's newer runner,
    which exists only on GPUs, return False: its noise already is a function of a row's seed and the token's
    position."""
    sampler = getattr(runner.sampler, "topk_topp_sampler", None)
    if sampler is None:
        return False
    sampler.forward = functools.partial(_draw, runner)
    return True


def seed_arguments(seed: int) -> dict[str, int]:
    """Return the extra arguments of a request, which carry the row's seed to the sampler."""
    return {"seed": signed(seed)}


def _draw(runner: Any, logits: Tensor, generators: Any, top_k: Any, top_p: Any) -> tuple[Tensor, Tensor]:
    """Return (tokens int64 [rows], log-probs [rows, vocabulary] of the distribution that they are drawn
    from).

    logits: already divided by the temperature. vLLM also calls this for rows whose prompt is not yet
    complete, and discards the result. All rows of a step belong to one call of ``generate``, so they have the
    same sampling options.
    """
    rows = [runner.requests[name] for name in runner.input_batch.req_ids]
    options = rows[0].sampling_params
    logprobs = truncated(logits, options.top_k, options.top_p).log_softmax(-1, dtype=torch.float32)
    uniform = uniforms_at(
        [row.sampling_params.extra_args["seed"] for row in rows], [len(row.output_token_ids) for row in rows]
    )
    return inverse(logprobs, uniform.to(logits.device)), logprobs


CPU_CACHE = 256 << 20  # bytes
# methods of layers that compute with their weights as stored
LIVE = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
Stops = Callable[[list[int]], bool]  # whether the newest token of a row ends it


@dataclass
class Row:
    """One response, which grows token by token."""

    tokens: list[int] = field(default_factory=list)  # ids sampled so far
    logprobs: list[float] = field(default_factory=list)  # log-prob of each sampled token
    # version of the weights with which each token was sampled
    versions: list[int] = field(default_factory=list)
    ended: bool = False  # whether the response is complete
    stopped: bool = False  # whether it ended by itself, not by its length
    # log-probs of the prompt's tokens except the first, if requested
    scored: list[float] = field(default_factory=list)

    def grow(self, tokens: Sequence[int], logprobs: Sequence[float], version: int, stops: Stops) -> bool:
        """Add the tokens of a step. If ``stops`` is True after one of them, the tokens after it are dropped.
        Returns True in this case."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.versions.append(version)
            if stops(self.tokens):
                return True
        return False


class VllmEngine:
    """A vLLM engine, or this rank's part of an engine that several ranks share."""

    def __init__(self, spec: ModelSpec, settings: GeneratorSettings, architectures: Iterable[str]) -> None:
        self.seat = EngineRank.of_pool(settings.tensor_parallel)
        with prepared(spec.device, **self.seat.variables(spec.device)):
            self.vllm = imported(spec.device)
            internals.keep_groups()
            internals.know(architectures)
            if spec.device == "cpu":
                internals.leave_memory()
                internals.keep_weights_live()
                self.seat.name_segments()
            self.llm = self._started(spec, settings)
        self.seat.drop_segments()
        self.seat.check_group()
        self.direct = live(self.module)
        self.draws = draw_by_row_seed(internals.model_runner(self.llm))
        self.version = 0
        self._names = itertools.count()
        self._calls, self._line, self._between = threading.Lock(), threading.Lock(), threading.Lock()
        self._going, self._limit = threading.Event(), 0.0  # the deadline of a pause
        self._going.set()
        try:
            self.answers()
        except RuntimeError as error:  # the first step fails if vLLM lacks a kernel
            raise refusal(spec, error) from error

    def _started(self, spec: ModelSpec, settings: GeneratorSettings) -> Any:
        try:
            return internals.make_engine(self._arguments(spec, settings))
        except (ValueError, AssertionError, NotImplementedError) as error:
            raise refusal(spec, error) from error

    def _arguments(self, spec: ModelSpec, settings: GeneratorSettings) -> dict[str, Any]:
        cpu = spec.device == "cpu"
        cache = settings.kv_cache_memory_bytes or (CPU_CACHE if cpu else None)
        return {
            "model": str(spec.folder),
            "dtype": spec.dtype,
            "seed": spec.seed % 2**31,
            "trust_remote_code": False,
            "load_format": "safetensors",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "use_tqdm_on_load": False,
            "disable_log_stats": True,
            "logprobs_mode": "processed_logprobs",
            "distributed_executor_backend": self.seat.launcher,
            "tensor_parallel_size": self.seat.size,
            "kv_cache_memory_bytes": cache,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "max_model_len": settings.max_model_len or -1,
            "max_num_seqs": settings.max_num_seqs,
            "enforce_eager": settings.enforce_eager or cpu,
            "enable_prefix_caching": settings.prefix_caching,
            "enable_sleep_mode": settings.sleep_mode and not cpu,
            "async_scheduling": False,  # each token must be sampled with the weights of its step
        }

    @property
    def module(self) -> nn.Module:
        """This rank's part of the live model. If you change its parameters, the engine uses the new
        values."""
        return internals.model(self.llm)

    def answers(self) -> bool:
        """Sample one token as a test and return True. If the engine fails, raises its error."""
        rows = whole(self.sample([[0]], [Sampling(max_tokens=1)], [0], (), lambda _: False))
        return len(rows[0].tokens) == 1

    @property
    def vocabulary(self) -> int:
        """The number of the model's token ids."""
        return int(self.llm.vllm_config.model_config.get_vocab_size())

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a row, including the prompt."""
        return int(self.llm.vllm_config.model_config.max_model_len)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[Sampling],
        seeds: Sequence[int],
        eos: Sequence[int],
        stops: Stops,
    ) -> Iterator[Sequence[Row]]:
        """Sample one response for each of ``prompts``. Whenever a few responses have ended, and once more at
        the end, yields all responses (always the same objects).

        samplings, seeds: one per response. eos: tokens that end a response. stops: a function that is called
        after each token, and returns True to end the response.
        """
        parameters = [
            self._parameters(sampling, seed, eos) for sampling, seed in zip(samplings, seeds, strict=True)
        ]
        return self._rows(prompts, parameters, stops)

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return, for each row, the log-prob of each token except the first, at temperature 1."""
        parameters = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        return [row.scored for row in whole(self._rows(rows, [parameters] * len(rows), lambda _: False))]

    def _rows(
        self, prompts: Sequence[Sequence[int]], parameters: Sequence[Any], stops: Stops
    ) -> Iterator[Sequence[Row]]:
        rows = [Row() for _ in prompts]
        with self._calls:
            under_way: dict[str, Row] = {}
            try:
                self._add(under_way, rows, prompts, parameters)
                while under_way:
                    ended = self._step(under_way, stops)
                    for name in ended:
                        under_way.pop(name).ended = True
                    if ended and under_way:
                        yield rows
            finally:
                with contextlib.suppress(Exception):  # if the engine died, the first error is more useful
                    self.llm.abort_request(list(under_way))
        yield rows

    def _add(
        self,
        under_way: dict[str, Row],
        rows: Sequence[Row],
        prompts: Sequence[Sequence[int]],
        parameters: Sequence[Any],
    ) -> None:
        """Start requests for the prompts, and add request name → row to ``under_way``.

        Only rows of the same call share cached prompts. A prompt that was cached by an evaluation, by an
        earlier run or with other weights could change the last bits of a result.
        """
        salt = str(next(self._names))
        for row, prompt, own in zip(rows, prompts, parameters, strict=True):
            name = str(next(self._names))
            with self.alone():
                self.llm.add_request(name, {"prompt_token_ids": list(prompt), "cache_salt": salt}, own)
            under_way[name] = row

    def _parameters(self, sampling: Sampling, seed: int, eos: Sequence[int]) -> Any:
        return self.vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            seed=None if self.draws else seed,
            extra_args=seed_arguments(seed),
            stop_token_ids=list(eos),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=internals.only_new_tokens(),
        )

    def _step(self, under_way: Mapping[str, Row], stops: Stops) -> list[str]:
        """Run one engine step, which samples a token for each scheduled row. Returns the request names of the
        rows that have ended."""
        with self._turn():
            outputs, version = self.llm.step(), self.version
        ended = []
        for output in outputs:
            row, new = under_way[output.request_id], output.outputs[0]
            if output.prompt_logprobs is not None:
                row.scored = list(output.prompt_logprobs.logprobs)
            stopped = new.logprobs is not None and row.grow(
                new.token_ids, new.logprobs.logprobs, version, stops
            )
            if stopped and not output.finished:
                self.llm.abort_request([output.request_id])
            if stopped or output.finished:
                row.stopped = stopped or new.finish_reason == "stop"
                ended.append(output.request_id)
        return ended

    # -- weights between two steps
    # ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Return a context for one step. Waits until the engine is not paused and no other thread is in
        ``alone``. Raises TimeoutError if a pause lasts longer than its limit."""
        while True:
            if not self._going.wait(max(self._limit - time.monotonic(), 0.0)):
                raise TimeoutError(
                    "generate: found the engine paused past its deadline, expected resume() before it"
                )
            with self.alone():
                if self._going.is_set():  # no pause began in between
                    yield
                    return

    def pause(self, seconds: float) -> None:
        """Make no further steps until ``resume``. If a step is running, waits until it has finished. After
        ``seconds``, waiting calls raise TimeoutError."""
        if self.seat.size > 1:
            raise ValueError(
                f"pause: found an engine of {self.seat.size} ranks, which make their steps together, "
                "expected an engine of one rank"
            )
        self._limit = time.monotonic() + seconds
        self._going.clear()
        with self.alone():
            pass

    def resume(self, recompute: bool) -> None:
        """Continue after ``pause``. With ``recompute``, the cache of unfinished rows is dropped and computed
        again with the current weights."""
        if recompute:
            with self.alone():
                self.llm.reset_prefix_cache(reset_running_requests=True)
        self._going.set()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context between two steps, which only one thread at a time can enter. Threads enter in the
        order in which they wait, so a thread that makes many steps does not starve other threads."""
        with self._line:
            self._between.acquire()
        try:
            yield
        finally:
            self._between.release()

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """Return a context between two steps, in which weights may be written. After it, the weights have
        this version.

        Responses that are being sampled continue with the new weights and keep their cache. If several ranks
        share the engine, this waits until no call is running, because these ranks make their steps together.
        """
        with self._calls if self.seat.size > 1 else contextlib.nullcontext(), self.alone():
            yield
            self.version = version
            if not self.llm.has_unfinished_requests():
                self.llm.reset_prefix_cache()

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load this rank's part of each weight. ``weights`` yields (Hugging Face name, complete tensor).
        Raises ValueError if a name is unknown or missing, or if a shape does not fit."""
        if self.direct:
            load_weights(self.module, weights)
        # layer by layer through vLLM's conversion, for layers that do not compute with their weights as
        # stored
        else:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})


def whole(drawing: Iterable[Sequence[Row]]) -> Sequence[Row]:
    """Return all responses after the last one has ended."""
    return deque(drawing, maxlen=1).pop()


def ended_in_order(rows: Sequence[Row], at_once: int) -> list[int]:
    """Return the numbers of the ended rows, in an order that does not depend on the step in which a row
    ended.

    The first ``at_once`` rows come first, then the next ones. Within them, shorter rows come first. Of rows
    with equal lengths, rows that ended by themselves come first, then rows with lower numbers. An ended row
    is omitted as long as an unfinished row may still come before it.
    """
    open_from = min(
        ((number // at_once, len(row.tokens) + 1) for number, row in enumerate(rows) if not row.ended),
        default=(len(rows), 0),
    )
    ended = [
        (number // at_once, len(row.tokens), not row.stopped, number)
        for number, row in enumerate(rows)
        if row.ended
    ]
    return [key[-1] for key in sorted(ended) if key < open_from]


def refusal(spec: ModelSpec, error: Exception) -> PlanError:
    """Return the PlanError for a model or settings that vLLM does not support. error: vLLM's own error."""
    return PlanError.of(
        "vllm-engine",
        f"vLLM cannot run the model in {spec.folder}",
        found=str(error) or type(error).__name__,
        expected="a model and settings that vLLM supports",
        remedy="change --ROLE.model or settings, or --ROLE.generator local",
    )


def live(module: nn.Module) -> bool:
    """Return True if all layers compute with their weights as stored. Only then can weights be written in
    place."""
    methods = {
        type(method).__name__
        for layer in module.modules()
        if (method := getattr(layer, "quant_method", None)) is not None
    }
    # multi-head latent attention
    absorbed = any(hasattr(layer, "W_UK_T") or hasattr(layer, "W_UV") for layer in module.modules())
    return methods <= LIVE and not absorbed


def load_weights(module: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Load weights in place with the model's own loader. Raises ValueError if vLLM rejects a weight or if a
    weight is missing."""
    at = "the first"

    def noted() -> Iterator[tuple[str, Tensor]]:
        nonlocal at
        for name, tensor in weights:
            at = f"{name} {list(tensor.shape)}"
            yield name, tensor

    try:
        with torch.no_grad():
            loaded = module.load_weights(noted())
    except (KeyError, ValueError, AssertionError, RuntimeError) as error:
        raise ValueError(
            f"receive: vLLM rejects these weights, at {at}: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    missing = sorted({name for name, _ in module.named_parameters()} - set(loaded))
    if missing:
        raise ValueError(
            f"receive: found no weights for {listed(missing)}, expected every weight of the model"
        )
