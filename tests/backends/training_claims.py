"""Claims about a Trainer, compared with the local one, which treats each rank as the only one, and with a
plain forward of transformers.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from contract import Ground
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.author.columns import standard_kind
from rlflow.author.joint import JointLoss
from rlflow.backends import local
from rlflow.config.roles.bound import capabilities
from rlflow.training.following import follow
from rlflow.training.learning import RankShare
from rlflow.training.loss_rows import mask_counts, own_rows
from rlflow.training.objective import MinibatchTotals
from rlflow.training.protocols import ModelSpec, ResetsOptimizer, ShowsPieces

SETTINGS = {
    "lr": 1e-3,
    "max_grad_norm": 0.5,
    "weight_decay": 0.01,
    "micro_tokens": 40,
    "logit_tokens": 7,
    "warmup": 2,
}
# The rows of each optimizer step, in pairs, and the number of pairs of each data-parallel rank; the last rank
# takes the rest.
STEPS = [
    ([0, 1, 2, 3, 4, 5, 6, 7], [3, 1, 0, 0]),
    ([8, 9], [0, 1, 0, 0]),
    ([10, 11, 2, 3, 6, 7], [1, 2, 0, 0]),
]
AGAIN = [([8, 9, 4, 5, 0, 1], [2, 1, 0, 0])]
# for rows of real lengths, which the local trainer computes one by one
LONG_STEPS = [(list(range(64)), [18, 10, 0, 0])]

MOMENTS = ("exp_avg", "exp_avg_sq")
# for weights after equal steps: up to 1.2e-5 on an AMD EPYC, because Adam divides rounded gradients by their
# own size
FAR = 3e-5


@loss(new=("logprobs", "entropy"))
def both(new, mask):
    return -new.logprobs - 0.1 * new.entropy, {"entropy": new.entropy}


@loss
def broken(new, mask):
    return -new.logprobs * float("inf"), {}


@loss(new="values")
def regression(new, mask):
    return (new.values - 1).square(), {}


@loss(new="scores", rows="group")
def ranking(new, mask):
    return -torch.nn.functional.logsigmoid(new.scores[0::2] - new.scores[1::2]).repeat_interleave(2), {}


@loss
def likelihood(new, right):
    assert right.all()  # only its own rows
    return -new.logprobs, {}


JOINT = JointLoss((both, likelihood), (1.0, 0.5), (None, "right"))
OBJECTIVES = {"logprobs": (both, "tokens"), "values": (regression, "row-tokens"), "scores": (ranking, "rows")}


def rows(count=12):
    chance = torch.Generator().manual_seed(0)
    draw = lambda low, high: torch.randint(low, high, (count,), generator=chance).tolist()  # noqa: E731
    prompts, lengths = draw(1, 7), draw(1, 9)
    starts = [torch.randint(3, 60, (n,), generator=chance) for n in prompts]
    # a prefix of two prompts in three; six rows have it as their full prompt
    common = torch.randint(3, 60, (9,), generator=chance)
    starts = [
        starts[i] if i % 3 == 0 else torch.cat([common, starts[i]]) if i < 4 else common for i in range(count)
    ]
    return Batch.of(
        prompt_tokens=starts,
        tokens=[torch.randint(3, 60, (n,), generator=chance) for n in lengths],
        mask=[[i != 2 for i in range(n)] for n in lengths],
        group=[i // 2 for i in range(count)],
        temperature=[[1.0, 0.7][i % 2] for i in range(count)],
        right=[i % 3 == 0 for i in range(count)],
    )


def long_rows():
    """Return 64 shuffled rows of 10 to 2,000 tokens, half of them below 30, with prompts and responses that
    are long and short alternating.
    """
    chance = torch.Generator().manual_seed(1)
    lengths = (
        (10 * 200 ** (torch.arange(64) / 63) ** 3)
        .round()
        .long()[torch.randperm(64, generator=chance)]
        .tolist()
    )
    prompts = [
        max(1, round(length * share))
        for length, share in zip(lengths, [0.9, 0.5, 0.1, 0.98] * 16, strict=True)
    ]
    draw = lambda count: torch.randint(3, 60, (count,), generator=chance)  # noqa: E731
    tokens = [draw(length - prompt) for length, prompt in zip(lengths, prompts, strict=True)]
    starts = [draw(prompt) for prompt in prompts]
    for i in range(0, 64, 4):  # two rows of four have a common prefix with the first, up to its length
        for other in (i + 1, i + 3):
            alike = min(len(starts[i]), len(starts[other]))
            starts[other][:alike] = starts[i][:alike]
    return Batch.of(
        prompt_tokens=starts,
        tokens=tokens,
        mask=[[i % 50 != 2 for i in range(len(row))] for row in tokens],
        group=[i // 2 for i in range(64)],
        temperature=[[1.0, 0.7][i % 2] for i in range(64)],
    )


def shares(batch, steps, grouped, rank=0, ranks=1, joint=None):
    for taken, pairs in steps:
        own = own_rows(batch, joint)[torch.tensor(taken)] if joint else None
        totals = MinibatchTotals.of(mask_counts(batch)[torch.tensor(taken)], own)
        counts = pairs[: ranks - 1] + [sum(pairs[ranks - 1 :])]
        begin = 2 * sum(counts[:rank])
        mine = torch.tensor(taken[begin : begin + 2 * counts[rank]], dtype=torch.int64)
        yield RankShare(list(mine.split(2 if grouped else 1)) if len(mine) else [], totals)


def copied(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def follows(ground: Ground, head="logprobs", dtype="float32", **settings):
    """A frozen trainer that follows one that has learned gets the mean of both, bit for bit."""
    subject = Subject(ground, "reward" if head == "scores" else "llama", head, dtype=dtype, **settings)
    rest = {name: value for name, value in subject.settings.items() if name != "lora"}
    spec = replace(subject.spec, trained=False, follows=True)
    follower = ground.made("Trainer", spec, **rest)
    subject.learn(subject.one)
    before = subject.state(follower)
    for mix in (0.25, 1.0):
        own, other = subject.state(follower), subject.state(subject.one)
        follow(follower, subject.one.masters(), mix)
        for name, after in subject.state(follower).items():
            if name.startswith("parameters/"):
                expected = own[name] + (other[name] - own[name]) * mix if mix < 1 else other[name]
                assert after.dtype == torch.float32, name
                assert torch.equal(after.cpu(), expected.to(after).cpu()), name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in subject.state(follower).items())
    follower.forward(subject.rows.rows(subject.mine()), subject.want)


def check_same(found, expected):
    """Check all bits and the order of names. Ranks other than the first may have nothing."""
    if not found:
        return
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].cpu(), tensor.cpu()), name


class Subject:
    """A trainer of the backend, called with this rank's rows, and the local one, called with all rows."""

    def __init__(self, ground: Ground, case: str, head="logprobs", trained=True, dtype="float32", **settings):
        self.ground, self.folder = ground, ground.models / case.split()[0]
        self.spec = ModelSpec(self.folder, head, trained, dtype=dtype, seed=5)
        self.long = case.endswith(" long")
        self.rows, self.steps = (long_rows(), LONG_STEPS) if self.long else (rows(), STEPS)
        self.settings, self.grouped = SETTINGS | settings, head == "scores"
        tensor_parallel = settings.get("tensor_parallel", 1)
        self.rank, self.data = ground.rank // tensor_parallel, ground.ranks // tensor_parallel
        self.one = self.fresh()
        self.other = None if ground.modelless else self.reference()
        self.files = ground.folder / f"saved-{ground.name}-{ground.ranks}-{case.replace(' ', '-')}"

    @property
    def head(self):
        return self.spec.head

    @property
    def want(self):
        return ("logprobs", "entropy") if self.head == "logprobs" else (self.head,)

    def fresh(self):
        return self.ground.made("Trainer", self.spec, **self.settings)

    def reference(self):
        known = local.Trainer.Settings.__dataclass_fields__
        settings = {name: value for name, value in self.settings.items() if name in known} | (
            {"micro_tokens": 1} if self.long else {}
        )
        # each row by itself, unless another setting is given
        settings["packed"] = self.settings.get("packed", False)
        made = local.Trainer(self.spec, local.Trainer.Settings(**settings))
        made.peers = self.ground.peers()
        return made

    def mine(self):
        """Return this rank's own rows; the last of several ranks has none."""
        none = self.rank and self.rank == self.data - 1
        count = len(self.rows)
        return torch.arange(self.rank, count, max(self.data - 1, 1))[: 0 if none else count]

    def learn(self, one, steps=None, objective=None):
        """Return the metrics of a trainer for these steps: one of the backend on this rank's shares, the
        local one on all rows.
        """
        default, mean = (JOINT, ("tokens", "row-tokens")) if objective is JOINT else OBJECTIVES[self.head]
        place = (0, 1) if one is self.other else (self.rank, self.data)
        divided = list(
            shares(
                self.rows,
                steps or self.steps,
                self.grouped,
                *place,
                objective if objective is JOINT else None,
            )
        )
        return one.update_shares(self.rows, objective or default, divided, mean, {}).steps

    def state(self, one):
        """Return copies of the first rank's state, on all ranks."""
        state = copied(self.ground.first(one.state()))
        assert state
        return state

    def forward(self, one=None, atol=1e-5):
        found, wanted = (
            trainer.forward(self.rows.rows(self.mine()), self.want)
            for trainer in (one or self.one, self.other)
        )
        for name in self.want:
            torch.testing.assert_close(found[name], wanted[name], atol=atol, rtol=0)

    def distance(self):
        """Return ‖Δθ‖ / ‖θ‖ of both trainers' states, the maximum over ranks. All ranks fail together;
        otherwise one would wait for the other.
        """
        far = torch.tensor(self._distance(), dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(far, dist.ReduceOp.MAX)
        return float(far)

    def _distance(self):
        """Return the distance on this rank; 0 if it has no state."""
        found, wanted = self.one.state(), self.other.state()
        if not found:
            return 0.0
        assert list(found) == list(wanted)
        learning = [name for name in wanted if name.startswith(("parameters/", "adapters/"))]
        one, other = (
            torch.cat([state[name].flatten().double() for name in learning]) for state in (found, wanted)
        )
        return float((one - other).norm() / other.norm())

    def steps_alike(self, steps=None, objective=None):
        one, other = self.learn(self.one, steps, objective), self.learn(self.other, steps, objective)
        assert one["steps"] == other["steps"] == len(steps or self.steps)
        for name in ("loss", "grad_norm", "lr", "skipped_steps"):
            assert abs(one[name] - other[name]) <= 1e-5 * max(1.0, abs(other[name])), (name, one, other)

    def everything(self):
        """Check for the own checks of a backend that it computes and learns like the local trainer."""
        self.forward()
        self.steps_alike()
        assert self.distance() <= FAR, self.distance()


# -- claims
# ------------------------------------------------------------------------------------------------------------


def weights_match_the_folder(subject):
    """By Hugging Face name and bit."""
    if subject.ground.modelless or subject.head == "scores":
        return
    expected = AutoModelForCausalLM.from_pretrained(subject.folder).state_dict()
    found = dict(subject.one.weights())
    tied = {expected[name].data_ptr() for name in found}
    assert {name for name in expected if expected[name].data_ptr() not in tied} == set()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def a_forward_matches_transformers(subject):
    """Row by row, without padding, at each row's temperature. Heads of rlflow match the local trainer.
    Columns are complete.
    """
    batch = subject.rows.rows(subject.mine())
    found = subject.one.forward(batch, subject.want)
    assert set(found.columns) == set(subject.want)
    assert found.axis is batch.axis
    for name in subject.want:
        data = found.data[name]
        assert data.kind == standard_kind(name), name
        assert len(data.value) == (
            len(batch) if name == "scores" else int(batch.data["tokens"].lengths.sum())
        )
    if subject.ground.modelless:
        return None
    if subject.head != "logprobs":
        return subject.forward()
    model = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=torch.float32).eval()
    for i in range(len(batch)):
        row = batch.rows([i])
        prompt, tokens = row["prompt_tokens"][0], row["tokens"][0]
        with torch.no_grad():
            logits = (
                model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
                / row["temperature"][0]
            )
        distribution = logits.log_softmax(-1)
        logprobs, entropy = (
            distribution.gather(-1, tokens[:, None])[:, 0],
            -(distribution.exp() * distribution).sum(-1),
        )
        torch.testing.assert_close(found["logprobs"][i, : len(tokens)], logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(found["entropy"][i, : len(tokens)], entropy, atol=1e-5, rtol=0)


def a_rank_holds_its_part(subject):
    """A rank holds at most 0.6 of the memory of all weights if two ranks share it; together the ranks hold
    all.
    """
    if not isinstance(subject.one, ShowsPieces) or (pieces := subject.one.pieces()) is None:
        return
    storages = {
        piece.view.untyped_storage()._cdata: piece.view.untyped_storage().nbytes()
        for p in pieces.values()
        for piece in p.pieces
    }
    weights = dict(subject.one.weights())
    fraction = sum(storages.values()) / sum(tensor.nbytes for tensor in weights.values())
    divided = capabilities(type(subject.one), subject.one.settings, "cpu").divided or ()
    shared = subject.ground.ranks > 1 and "weights" in divided
    assert fraction <= 0.6 or not shared, fraction
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in weights.items()}
    for name, tensor in weights.items():
        for piece in pieces[name].pieces:
            place = tuple(slice(*sides) for sides in piece.box)
            assert torch.equal(piece.view, tensor[place]), name
            covered[name][place] += 1
    for name, counts in covered.items():
        whole = sum(subject.ground.together(counts))
        alike = subject.data if not shared else 1
        assert bool((whole >= alike).all()), name


def undisturbed(subject):
    """Check that a step with a non-finite gradient on the last rank only, and a sleep, change nothing."""
    if subject.head == "logprobs" and not subject.ground.modelless:
        reported = subject.learn(subject.one, [([10, 11], [0, 1, 0, 0])], broken)
        assert (reported["steps"], reported["skipped_steps"]) == (0, 1)
    subject.one.sleep()
    subject.one.wake()
    return subject.one


def steps_match_the_local_trainer(subject):
    if subject.ground.modelless:
        assert subject.learn(undisturbed(subject))["steps"] == len(subject.steps)
        return
    undisturbed(subject)
    subject.steps_alike()
    if subject.head == "logprobs" and not subject.long:
        subject.steps_alike(objective=JOINT)
    far = subject.distance()
    assert far <= FAR, far
    subject.forward(atol=1e-4)  # the weights no longer have the same bits


def training_continues_from_a_state(subject):
    """In a trainer of the same kind bit for bit; to the local trainer and back bit for bit; then the same
    steps follow.
    """
    state, fresh = subject.state(subject.one), subject.fresh()
    fresh.restore(copied(state))
    check_same(fresh.state(), state)
    subject.learn(fresh, AGAIN)
    subject.learn(undisturbed(subject), AGAIN)
    check_same(fresh.state(), subject.one.state())
    if subject.ground.modelless:
        return
    subject.other.restore(copied(state))
    check_same(subject.other.state(), state)
    subject.learn(subject.other, AGAIN)
    assert subject.distance() <= 1e-6
    state = copied(subject.other.state())
    subject.one.restore(copied(state))
    check_same(subject.one.state(), state)


def a_reset_optimizer_steps_like_a_new_one(subject):
    """Moments and the count of steps are forgotten; weights stay, and a state remembers the reset."""
    one = subject.fresh()
    if not isinstance(one, ResetsOptimizer):
        return
    subject.learn(one)
    before = subject.state(one)
    one.reset_optimizer()
    bare = {name: tensor for name, tensor in before.items() if name.partition("/")[0] not in MOMENTS}
    check_same(without_reset(subject.state(one)), bare)
    assert subject.ground.modelless or bare.keys() != before.keys()
    new, again = subject.fresh(), subject.fresh()
    new.restore(copied(bare))
    for trainer in (one, new):
        subject.learn(trainer, AGAIN)
    found = subject.state(one)
    check_same(without_reset(found), subject.state(new))
    again.restore(copied(found))
    check_same(subject.state(again), found)
    for trainer in (one, again):
        subject.learn(trainer, AGAIN)
    check_same(subject.state(again), subject.state(one))


def without_reset(state):
    """Return a state without the count of steps before the optimizer was reset."""
    return {name: tensor for name, tensor in state.items() if name != "steps_before_reset"}


def a_frozen_model_continues_from_a_state(subject):
    """With weights and a value head of another trainer, like after a stage with side effects."""
    state = subject.state(subject.one)
    frozen = subject.ground.made("Trainer", replace(subject.spec, trained=False), **subject.settings)
    frozen.restore(copied(state))
    kept = {
        name: tensor for name, tensor in state.items() if name.startswith("parameters/") or name == "steps"
    }
    check_same(dict(sorted(frozen.state().items())), dict(sorted(kept.items())))


def a_saved_folder_is_loaded(subject):
    """transformers loads it with the bits of the weights, and the trainer loads it too."""
    subject.one.save(subject.files)
    subject.ground.together(None)
    fresh = subject.fresh()
    fresh.load(subject.files)
    if subject.ground.modelless:
        return check_same(fresh.state(), subject.one.state())
    kinds = {"scores": AutoModelForSequenceClassification}
    expected = kinds.get(subject.head, AutoModelForCausalLM).from_pretrained(subject.files).state_dict()
    weights = dict(subject.one.weights())
    check_same({name: expected[name] for name in weights}, weights)
    check_same(dict(fresh.weights()), weights)
    assert (subject.files / "tokenizer.json").read_bytes() == (subject.folder / "tokenizer.json").read_bytes()
    if subject.head != "logprobs":
        subject.other = local.Trainer(ModelSpec(subject.files, subject.head))
        subject.other.peers = subject.ground.peers()
        subject.forward(fresh)


def a_step_to_non_finite_parameters_is_an_error(subject):
    if subject.ground.modelless:
        return
    wild = subject.ground.made("Trainer", subject.spec, **subject.settings | {"lr": 1e38, "warmup": 0})
    with pytest.raises(FloatingPointError, match="parameters have NaN or infinities"):
        subject.learn(wild)


CLAIMS = {
    "weights match the folder": weights_match_the_folder,
    "a forward matches transformers": a_forward_matches_transformers,
    "a rank holds its part": a_rank_holds_its_part,
    "steps match the local trainer": steps_match_the_local_trainer,
    "training continues from a state": training_continues_from_a_state,
    "a frozen model continues from a state": a_frozen_model_continues_from_a_state,
    "a step to non-finite parameters is an error": a_step_to_non_finite_parameters_is_an_error,
    "a reset optimizer steps like a new one": a_reset_optimizer_steps_like_a_new_one,
    "a saved folder is loaded": a_saved_folder_is_loaded,
}
OF_LONG_ROWS = ("a forward matches transformers", "steps match the local trainer")
OF_RANKS = ("steps match the local trainer",)
OF_LAYOUTS = (
    "a rank holds its part",
    "steps match the local trainer",
    "training continues from a state",
    "a reset optimizer steps like a new one",
)
