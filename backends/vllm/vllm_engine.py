"""Run vLLM's engine in this process, one step at a time. Each step adds tokens to the rows, and weights are
written between steps."""

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
    """Make this model runner draw tokens the way the local backend does.

    Returns False, and changes nothing, for vLLM's newer runner (GPU only), whose noise already depends only
    on a row's seed and the token's position.
    """
    sampler = getattr(runner.sampler, "topk_topp_sampler", None)
    if sampler is None:
        return False
    sampler.forward = functools.partial(_draw, runner)
    return True


def seed_arguments(seed: int) -> dict[str, int]:
    """Return the extra request arguments that carry a row's seed to the sampler."""
    return {"seed": signed(seed)}


def _draw(runner: Any, logits: Tensor, generators: Any, top_k: Any, top_p: Any) -> tuple[Tensor, Tensor]:
    """Return the drawn tokens, int64 [rows], and the log-probs [rows, vocabulary] of the distribution they
    are drawn from.

    logits: already divided by the temperature. vLLM also calls this for rows whose prompt isn't complete yet,
    and discards the result. All rows of a step belong to the same call of ``generate``, so they share their
    sampling options.
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
    """A response that grows token by token."""

    tokens: list[int] = field(default_factory=list)  # ids sampled so far
    logprobs: list[float] = field(default_factory=list)  # log-prob of each sampled token
    # version of the weights with which each token was sampled
    versions: list[int] = field(default_factory=list)
    ended: bool = False  # whether the response is complete
    stopped: bool = False  # whether it ended by itself, not by its length
    # log-probs of the prompt's tokens except the first, if requested
    scored: list[float] = field(default_factory=list)

    def grow(self, tokens: Sequence[int], logprobs: Sequence[float], version: int, stops: Stops) -> bool:
        """Add the tokens of a step, up to and including the first for which ``stops`` is True. Returns True
        if there is one."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.versions.append(version)
            if stops(self.tokens):
                return True
        return False


class VllmEngine:
    """A vLLM engine, or this rank's part of one that several ranks share."""

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
        """This rank's part of the live model. Changes to its parameters take effect in the engine."""
        return internals.model(self.llm)

    def answers(self) -> bool:
        """Return True if a test token can be sampled. If the engine fails, its error is raised."""
        rows = whole(self.sample([[0]], [Sampling(max_tokens=1)], [0], (), lambda _: False))
        return len(rows[0].tokens) == 1

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the model has."""
        return int(self.llm.vllm_config.model_config.get_vocab_size())

    @property
    def longest(self) -> int:
        """The maximum length of a row in tokens, including the prompt."""
        return int(self.llm.vllm_config.model_config.max_model_len)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[Sampling],
        seeds: Sequence[int],
        eos: Sequence[int],
        stops: Stops,
    ) -> Iterator[Sequence[Row]]:
        """Sample one response to each prompt. Yields all responses (always the same objects) each time a few
        have ended, and once more at the end.

        samplings, seeds: one per response. eos: tokens that end a response. stops: called after each token;
        returns True to end the response.
        """
        parameters = [
            self._parameters(sampling, seed, eos) for sampling, seed in zip(samplings, seeds, strict=True)
        ]
        return self._rows(prompts, parameters, stops)

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each row, return the log-prob of every token but the first, at temperature 1."""
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
        """Start a request for each prompt, and add the new rows to ``under_way`` by request name.

        Only rows of the same call share cached prompts. A prompt cached during an evaluation, in an earlier
        run or with other weights could change the last bits of a result.
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
        """Run one engine step, which samples a token for each scheduled row, and return the request names of
        the rows that have ended."""
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
        """Hold the engine for one step, after waiting until it isn't paused and no other thread is in
        ``alone``. Raises TimeoutError if a pause exceeds its limit."""
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
        """Take no more steps until ``resume``, after waiting for the current step to finish. Calls still
        waiting after ``seconds`` raise TimeoutError."""
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
        """Continue after ``pause``. With ``recompute``, the cache of unfinished rows is dropped and
        recomputed with the current weights."""
        if recompute:
            with self.alone():
                self.llm.reset_prefix_cache(reset_running_requests=True)
        self._going.set()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Give the calling thread exclusive access to the engine between two steps.

        Threads take turns in the order in which they started waiting, so a thread that takes many steps
        doesn't starve the others.
        """
        with self._line:
            self._between.acquire()
        try:
            yield
        finally:
            self._between.release()

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """Let a ``with`` block write weights between two steps. When the block ends, the weights have this
        version.

        Responses that are being sampled continue with the new weights and keep their cache. If several ranks
        share the engine, they take their steps together, so this first waits until no call is running.
        """
        with self._calls if self.seat.size > 1 else contextlib.nullcontext(), self.alone():
            yield
            self.version = version
            if not self.llm.has_unfinished_requests():
                self.llm.reset_prefix_cache()

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load this rank's part of each weight. Raises ValueError if a name is unknown or missing, or if a
        shape doesn't fit.

        weights: (Hugging Face name, complete tensor) pairs.
        """
        if self.direct:
            load_weights(self.module, weights)
        # layer by layer through vLLM's conversion, for layers that do not compute with their weights as
        # stored
        else:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})


def whole(drawing: Iterable[Sequence[Row]]) -> Sequence[Row]:
    """Return all responses once the last one has ended."""
    return deque(drawing, maxlen=1).pop()


def ended_in_order(rows: Sequence[Row], at_once: int) -> list[int]:
    """Return the numbers of the ended rows, in an order that doesn't depend on the step at which each row
    ended.

    The first ``at_once`` rows come first, then the next ones, and so on. Among these, shorter rows come
    first. Rows of equal length are ordered by how they ended (those that ended by themselves come first) and
    then by number. An ended row is left out for as long as an unfinished row may still come before it.
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
    """Turn vLLM's ``error`` into a PlanError for a model or settings that it doesn't support."""
    return PlanError.of(
        "vllm-engine",
        f"vLLM cannot run the model in {spec.folder}",
        found=str(error) or type(error).__name__,
        expected="a model and settings that vLLM supports",
        remedy="change --ROLE.model or settings, or --ROLE.generator local",
    )


def live(module: nn.Module) -> bool:
    """Return True if all layers compute directly with their stored weights. Only then can weights be written
    in place."""
    methods = {
        type(method).__name__
        for layer in module.modules()
        if (method := getattr(layer, "quant_method", None)) is not None
    }
    # multi-head latent attention
    absorbed = any(hasattr(layer, "W_UK_T") or hasattr(layer, "W_UV") for layer in module.modules())
    return methods <= LIVE and not absorbed


def load_weights(module: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Load weights in place with the model's own loader. Raises ValueError if vLLM rejects a weight or if one
    is missing."""
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
