"""What a row draws: its own uniform number for each of its tokens, the one that the local backend takes for it.

vLLM's sampler would give each row a generator, and draw from it in every step that looks at the row: also where the step read a part of the
prompt alone, which it then takes back, and a CPU's generator has no way back. Here a number is a function of the row's seed and of how many
tokens the row has, so neither how prompts are cut, nor who else is sampled, nor a row that is put off and computed anew has a say.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rlflow.author.seeds import signed, uniforms_at
from rlflow.backends.local.sampling import inverse, truncated


def installed(runner: Any) -> bool:
    """Have this model runner's rows drawn so. False where it is vLLM's newer one, which runs on GPUs alone: its noise is a function of a
    row's seed and the token's place as it is."""
    sampler = getattr(runner.sampler, "topk_topp_sampler", None)
    if sampler is None:
        return False
    sampler.forward = functools.partial(_drawn, runner)
    return True


def told(seed: int) -> dict[str, int]:
    """The extra arguments of a request from which the runner's sampler takes the row's chance."""
    return {"seed": signed(seed)}


def _drawn(runner: Any, logits: Tensor, generators: Any, top_k: Any, top_p: Any) -> tuple[Tensor, Tensor]:
    """The tokens, int64 [rows], and the log-probs that they are drawn from, [rows, vocabulary], of logits that are divided by the
    temperature. Also of rows whose prompt is not read to its end, for which it means nothing and is thrown away.

    The rows of a step are those of one call of ``generate``, which samples all alike."""
    rows = [runner.requests[name] for name in runner.input_batch.req_ids]
    asked = rows[0].sampling_params
    logprobs = truncated(logits, asked.top_k, asked.top_p).log_softmax(-1, dtype=torch.float32)
    uniform = uniforms_at([row.sampling_params.extra_args["seed"] for row in rows], [len(row.output_token_ids) for row in rows])
    return inverse(logprobs, uniform.to(logits.device)), logprobs
