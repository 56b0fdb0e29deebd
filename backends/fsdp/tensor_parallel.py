"""Tensor parallelism by the plan that a Hugging Face model brings along (Megatron-LM, Shoeybi et al. 2019): column-parallel projections
into attention and feed-forward, row-parallel ones out of them, embedding and language-model head split by vocabulary."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rlflow.errors import PlanError, listed

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
VOCABULARY = "embedding_rowwise"  # named by some releases of transformers; here embedding and head go together
ADDED = "replicated_with_grad_allreduce"  # whole on each rank, which has the gradient of its own heads only


def parallelize(module: Any, mesh: DeviceMesh) -> list[str]:
    """Split the layers of ``module`` over ``mesh``, in place. Gives the names of parameters whose gradients are still to be added up over
    it. Raises PlanError for a model without a plan that is known here, or of which the ranks cannot have equal parts."""
    config = module.config.get_text_config()
    plan = {name: style for name, style in (getattr(config, "base_model_tp_plan", None) or {}).items() if style != VOCABULARY}
    _check(module, config, plan, mesh.size())
    inside = module.base_model
    parallelize_module(inside, mesh, {name: STYLES[style]() for name, style in plan.items() if style in STYLES})
    _vocabulary(module, mesh)
    prefix = f"{module.base_model_prefix}."
    added = [name for name, style in plan.items() if style == ADDED]
    return [name for name, _ in module.named_parameters() if any(fnmatch(name, f"{prefix}{pattern}.*") for pattern in added)]


def _vocabulary(module: Any, mesh: DeviceMesh) -> None:
    """Embedding and language-model head, where the ranks can have equal parts; else both stay whole."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if embedding.weight.shape[0] % mesh.size():
        return
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    if head is not None:
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    if tied:
        head.weight = embedding.weight


def _check(module: Any, config: Any, plan: dict[str, str], ranks: int) -> None:
    name = type(module).__name__
    unknown = sorted(set(plan.values()) - {*STYLES, ADDED})
    if not plan or unknown:
        raise PlanError.of("tensor-parallel", f"{name} cannot be split by tensor parallelism here",
                           found=f"a plan with {listed(unknown)}" if plan else "no plan in its config",
                           expected="a dense decoder with a plan for its linear layers, such as Llama, Qwen3 or Gemma 3",
                           remedy="--tensor-parallel 1")
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (count := getattr(config, what, ranks)) % ranks:
            raise PlanError.of("tensor-parallel", f"{what} of {name} does not divide into {ranks} equal parts", found=str(count),
                               expected=f"a multiple of {ranks}", remedy="a smaller --tensor-parallel")
