"""The options of a run.

Every field is a flag and a key in configuration files. The comment on a field is its help text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import ByteSize

from rlflow.compiler.placement import Pools


@dataclass(frozen=True)
class Options:
    """The options of `rlflow run`.

    Settings of the algorithm (--hp.NAME) and of backends (--ROLE.NAME) are not options.
    """

    # model that model roles start from: a Hugging Face folder, or OWNER/NAME[@REVISION] on the Hub
    model: str | None = None
    # [NAME=]FILE[:WEIGHT]: .jsonl, .json, .parquet, .csv, a Hugging Face dataset folder, a reasoning-gym task, or
    # OWNER/NAME[@REVISION][:CONFIG][/SPLIT] on the Hub; repeatable
    data: tuple[str, ...] = ()
    # what to do with records that a model cannot take: stop before the run, or skip them
    bad_records: Literal["stop", "skip"] = "stop"
    # task, math, FILE.py:function, a model (folder or name on the Hub) or a URL, with an optional @SOURCE and
    # :WEIGHT; repeatable
    reward: tuple[str, ...] = ()
    # environment of the role that samples: FILE.py:Class or LIBRARY:ID; its settings and limits: --env.NAME
    env: str | None = None
    prompts: Annotated[int, Ge(1)] = 64  # prompts per iteration
    # draw prompts from all records by weight: TABLE.COLUMN of a table of the flow, or of a stage that reads only
    # this table; default: all records in a new order in each epoch
    prompts_by: str | None = None
    iterations: Annotated[int, Ge(1)] = 100  # iterations of the algorithm
    held_out: Annotated[int, Ge(0)] = 512  # prompts kept out of training for evaluation
    eval: tuple[str, ...] = ()  # a further held-out set, as NAME=FILE; repeatable
    # sampled answers to each held-out prompt; from 2 on, mean@n, pass@k and maj@k are measured too
    eval_samples: Annotated[int, Ge(1)] = 1
    eval_every: Annotated[int, Ge(0)] = 0  # iterations between evaluations; 0: only before and after the run
    # iterations between checkpoints; 0: only at the end and when the run is stopped
    save_every: Annotated[int, Ge(0)] = 10
    keep: Annotated[int, Ge(1)] = 2  # number of checkpoints to keep
    # seconds for one row of a reward function, or for one batch of a server including retries
    reward_timeout: Annotated[float, Gt(0)] = 60.0
    # maximum number of reward processes; default: depends on the cores and on how long rows wait
    reward_workers: Annotated[int, Ge(1)] | None = None
    # an environment variable that users' rewards and environments can read; repeatable
    reward_env: tuple[str, ...] = ()
    # a folder where users' rewards and environments may change files, / for all; repeatable
    reward_write: tuple[str, ...] = ()
    # whether users' rewards and environments may use the network and local sockets
    reward_network: bool = False
    # memory limit of each reward or environment process, such as 2GiB; default: 3/4 of the machine's memory
    reward_memory: ByteSize | None = None
    unsafe_scorers: bool = False  # allow tasks whose scorers evaluate text even if they cannot be isolated
    max_missing: Annotated[float, Ge(0), Le(1)] = 0.5  # share of an iteration's rewards that may be missing
    # factor by which trainer and sampler may differ on a token before the run warns
    max_mismatch: Annotated[float, Gt(1)] = 1.05
    # weight check: compare a trainer and generator of different backends every N iterations; 0: never
    canary: Annotated[int, Ge(0)] = 1
    # before the run, check that it learns from its rewards; warn: start it even if a check fails
    prove: Literal["auto", "quick", "strict", "warn", "off"] = "auto"
    # stop after N iterations in a row in which some update takes no finite optimizer step; 0: never
    max_bad: Annotated[int, Ge(0)] = 3
    # serve the run's metrics to Prometheus on this port of the loopback address
    metrics_port: Annotated[int, Ge(1), Le(65535)] | None = None
    track: tuple[str, ...] = ()  # tensorboard, wandb or mlflow; repeatable
    # longest prompt plus response in tokens, for models whose rotary frequencies depend on it; 0: computed
    longest_row: Annotated[int, Ge(0)] = 0
    seed: Annotated[int, Ge(0)] = 0  # seed of all random numbers
    out: str = "runs"  # parent folder of run folders
    name: str | None = None  # name of the run folder; default: FLOW-N
    resume: Literal["auto"] | None = None  # auto: resume the run --name if it exists
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # in which models compute
    backend: str = "local"  # trainer and generator of every role: local, null, or a dotted module
    # NAME=RANKS,…: pools of Ray workers; NAME=RANKS@threads: ranks are threads; default: one process
    pools: Pools | None = None
    # a running Ray cluster to join: auto or HOST:PORT; default: --pools starts one on this machine
    ray_address: str | None = None
    # network interface of ranks on several machines, by name or as 10.0.0.0/8; default: the route to Ray
    interface: str | None = None
    # accept a Ray cluster without a token, and addresses that the internet may reach
    insecure: bool = False
    # seconds of silence after which a worker is killed; 0: only watch for deaths
    heartbeat: Annotated[float, Ge(0)] = 15.0
    # seconds to wait for a cluster (at least 30 to join it) and for free resources, also in recovery
    wait_for_nodes: Annotated[float, Ge(0)] = 30.0
    load_timeout: Annotated[float, Gt(0)] = 600.0  # seconds that workers may take to load their models
    # in-memory checkpoint of the models every N iterations; 0: never; default: 1 on pools, otherwise 0
    commit_every: Annotated[int, Ge(0)] | None = None
    # how weights are moved to generators; alltoall: through Ray's object store between pools
    weights: Literal["auto", "segment", "alltoall", "gather"] = "auto"
    # compare digests of weights on all ranks every N transfers; 0: never
    verify_every: Annotated[int, Ge(0)] = 16
    # memory limit of models on each rank, such as 20GiB; parts that do not fit are offloaded; default: none
    memory: ByteSize | None = None
    staleness: int = 0  # iterations by which sampling weights may be older than the trained weights
    # score sampled rows in N chunks while others are still sampled; 1: score when all are sampled
    stream: Annotated[int, Ge(1), Le(1024)] = 1
    threads: Annotated[int, Ge(0), Le(1024)] = 0  # PyTorch threads; 0: one per core

    @property
    def copies_every(self) -> int:
        """The number of iterations between in-memory checkpoints of the models, or 0 if there are none.

        Pools recover from these checkpoints if a worker dies.
        """
        return self.commit_every if self.commit_every is not None else int(bool(self.pools))
