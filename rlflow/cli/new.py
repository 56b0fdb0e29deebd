"""`rlflow new`: a file to start an algorithm from."""

from __future__ import annotations

import keyword
from pathlib import Path

from rlflow.errors import PlanError

TEMPLATE = '''"""{title}: say in one sentence what it is and which paper it follows."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import flow, group_mean, loss, stage


@dataclass(frozen=True)
class Settings:  # each is a flag of `rlflow run`: --hp.clip 0.1
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 256  # longest response
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    minibatch: Annotated[int, Ge(1)] = 64  # rows per optimizer step


# A stage is a function of columns. Positional parameters name the columns it reads, keyword-only ones are settings. It sees tensors
# padded to the longest row: tokens [rows, T], scores [rows]. rows="group": whole groups of samples of one prompt.
@stage(gives="advantages", rows="group")
def advantages(scores, group, mask):
    advantage = scores - group_mean(scores, group)  # NaN marks a missing score: such rows are left out of the update
    return torch.where(mask, advantage[:, None], 0.0)


# A loss gets what the model computes now (new.logprobs) and columns, and gives one value per token (or per row) and metrics. The
# trainer averages: over all tokens of the minibatch unless `update(…, mean=…)` says otherwise.
@loss
def policy_loss(new, logprobs, advantages, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -gain, {{"clipped": (ratio - 1).abs() > clip}}


# The flow is one iteration. The first parameter is the data, `hp` the settings, every other a role: a model is what it is used for.
@flow
def {name}(prompts, actor, reward, hp=Settings()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)  # gives tokens, mask, completion, …
    batch |= reward(batch)  # gives scores
    batch |= actor.logprobs(batch)  # before the update: the old policy
    batch |= advantages(batch)
    actor.update(batch, policy_loss, clip=hp.clip, minibatch=hp.minibatch)
'''


def write_new(target: Path) -> int:
    """Write the file. Raises PlanError where it exists, cannot be written, or its name is no Python name."""
    path = target if target.suffix == ".py" else target.with_name(target.name + ".py")
    if not path.stem.isidentifier() or keyword.iskeyword(path.stem):
        raise PlanError.of("new-name", f"'{path.stem}' cannot name a flow", found=path.stem,
                           expected="letters, digits and '_', no word of Python's", remedy="choose another name")
    try:
        with path.open("x") as file:
            file.write(TEMPLATE.format(name=path.stem, title=path.stem.replace("_", " ").capitalize()))
    except FileExistsError:
        raise PlanError.of("new-exists", f"'{path}' exists", found="a file", expected="a new name", remedy="choose another name") from None
    except OSError as error:
        raise PlanError.of("new-folder", f"'{path}' cannot be written", found=str(error.strerror), expected="a folder that is there",
                           remedy="create the folder first") from error
    print(f"wrote {path}\n  rlflow check {path}\n  rlflow run {path}")
    return 0
