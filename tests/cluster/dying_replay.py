"""A flow that keeps rows in a buffer, whose workers die as in dying.py next to this file."""

from dying import happen_now, in_worker

from rlflow import buffer, compare, concat, flow, loss, truncated_weights


@loss
def policy_loss(new, logprobs, advantages, weights):
    if in_worker():  # in the driver, `check` calls a loss on synthetic rows
        happen_now("update")
    return -(new.logprobs - logprobs).exp() * advantages * weights, {}


@flow(keeps=lambda hp: {"past": buffer(groups=8, max_age=2)})
def replay(prompts, actor, reward, past):
    old = past.draw(groups=3)
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    past.put(batch)
    both = concat(batch, old)
    both |= compare(both)
    both |= actor.logprobs(both)
    both |= truncated_weights(both, cap=2.0)
    actor.update(both, policy_loss, minibatch=8)
