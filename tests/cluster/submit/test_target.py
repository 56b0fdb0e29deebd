"""The output of `rlflow job` as golden files, and its refusals. RLFLOW_WRITE_GOLDEN=1 writes the files anew;
read the difference."""

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from install import SKYPILOT

from rlflow import PlanError
from rlflow.cli.job import FORMS, print_job
from rlflow.cluster.submit.documents import joined
from rlflow.cluster.submit.kuberay import key_of
from rlflow.cluster.submit.skypilot import task_of
from rlflow.cluster.submit.target import TOKEN, target_of
from rlflow.config.flags import parse_flags
from rlflow.processes.declare import Service

HERE = Path(__file__).parent
SEARCH = [
    "--service.search",
    "rlflow serve retrieve corpus.jsonl",
    "--service.search.wait",
    "300",
    "--service.search.cpus",
    "4",
    "--service.search.delay",
    "30",
    "--service.judge_model",
    "python judge.py --port {port} --ask {search}",
    "--service.judge_model.gpus",
    "1",
    "--service.wiki",
    "http://wiki.example:8000",
]
CASES = {
    "one": [
        "grpo",
        "--prompts",
        "32",
        "--actor.lr",
        "1e-6",
        "--track",
        "wandb",
        "--job.accelerators",
        "H100:8",
        "--job.image",
        "r.example/rl:1",
    ],
    "kept": ["grpo", "--pools", "all=16", "--job.nodes", "2", "--job.image", "r.example/rl:1"],
    "many": [
        "ppo",
        "--pools",
        "train=8,rollout=8",
        "--env",
        "search",
        "--env.url",
        "{search}/retrieve",
        "--hp.beta",
        "0.01",
        *SEARCH,
        "--job.nodes",
        "2",
        "--job.accelerators",
        "H100:8",
        "--job.cpus",
        "32",
        "--job.image",
        "r.example/rl:1",
        "--job.secret",
        "HF_TOKEN",
        "--job.secret",
        "WANDB_API_KEY",
    ],
}


# by third-party code, which takes seconds
READ = [pytest.param("one", marks=pytest.mark.long), "kept", "many"]
KEPT = {
    "skypilot": "s3://my-bucket/runs",
    "kuberay": "my-claim",
    "ray": "/shared/runs",
    "slurm": "/scratch/runs",
}
SLURM = {"one": ["--job.time", "1-12", "--job.seeds", "0-4"], "kept": [], "many": ["--name", "mine"]}


def printed(capsys, case, kind):
    file, *flags = CASES[case]
    if kind == "slurm":  # such a job has the environment of the shell that submits it
        flags = [*flags[: flags.index("--job.image")], *flags[flags.index("--job.image") + 2 :], *SLURM[case]]
    assert (
        print_job(file, [*flags, *(["--job.keep", KEPT[kind]] if case == "kept" else []), "--for", kind]) == 0
    )
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_the_output_equals_the_golden_file(capsys, case, kind):
    text, path = printed(capsys, case, kind), HERE / "golden" / f"{case}.{kind}.txt"
    if os.environ.get("RLFLOW_WRITE_GOLDEN"):
        path.write_text(text)
    assert path.is_file(), f"no {path.name}: run this test with RLFLOW_WRITE_GOLDEN=1"
    assert text == path.read_text()


def test_a_job_group_has_a_task_per_machine_and_service(capsys):
    header, run, workers, search, judge = yaml.safe_load_all(printed(capsys, "many", "skypilot"))
    assert header == {
        "name": "ppo",
        "execution": "parallel",
        "primary_tasks": ["run"],
        "termination_delay": {"default": "0s", "search": "30s", "judge-model": "0s"},
    }
    assert [task["name"] for task in (run, workers, search, judge)] == [
        "run",
        "workers",
        "search",
        "judge-model",
    ]
    assert (run["num_nodes"], workers["num_nodes"]) == (1, 1)
    assert (
        dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN", "RLFLOW_SERVE_TOKEN")) == run["secrets"]
    )
    assert 'export RLFLOW_SERVICE_SEARCH=http://search-0."${SKYPILOT_JOBGROUP_NAME}":8001\n' in run["run"]
    assert "export RLFLOW_SERVICE_WIKI=http://wiki.example:8000\n" in run["run"]
    assert judge["resources"]["accelerators"] == "H100:1"


def test_the_shell_of_a_task_passes_urls_and_flags_unchanged(capsys):
    run = list(yaml.safe_load_all(printed(capsys, "many", "skypilot")))[1]["run"]
    command = next(line for line in run.splitlines() if line.startswith("rlflow run"))
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command}"],
        env={"SKYPILOT_JOBGROUP_NAME": "ppo-7", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert shown[:5] == ["rlflow", "run", "ppo", "--pools", "train=8,rollout=8"]
    given = dict(zip(shown[3::2], shown[4::2], strict=True))
    assert given["--env.url"] == "http://search-0.ppo-7:8001/retrieve"
    assert given["--service.search"] == "http://search-0.ppo-7:8001"
    assert given["--service.wiki"] == "http://wiki.example:8000"
    assert given["--service.search.wait"] == "300"
    assert given["--ray-address"] == "127.0.0.1:6379"


def test_an_unusual_health_path_of_a_service_is_kept(
    capsys,
):
    assert (
        print_job(
            "grpo",
            [
                "--service.search",
                "serve",
                "--service.search.health",
                "/is it up",
                "--service.judge",
                "judge",
                "--for",
                "skypilot",
            ],
        )
        == 0
    )
    run = next(task["run"] for task in yaml.safe_load_all(capsys.readouterr().out) if task["name"] == "run")
    command = shlex.split(next(line for line in run.splitlines() if line.startswith("rlflow run")))
    assert command[command.index("--service.search.health") + 1] == "/is it up"
    assert "--service.judge.health" not in command


def rayjob_schema():
    return json.loads(gzip.decompress((HERE / "crd" / "rayjob-v1.schema.json.gz").read_bytes()))


def strict(schema):
    """Return the schema with unknown fields refused, as the API server does with strict validation."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(each) for name, each in schema.items()}
    free = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not free:
        closed.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return closed


@pytest.mark.slow
@pytest.mark.parametrize("case", READ)
def test_a_rayjob_is_valid_under_the_schema_of_its_resource(capsys, case):
    documents = list(yaml.safe_load_all(printed(capsys, case, "kuberay")))
    (job,) = [document for document in documents if document["kind"] == "RayJob"]
    schema = strict(rayjob_schema())
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    jsonschema.validate(job, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**job, "spec": {**job["spec"], "entrypont": ""}}, schema)
    names = {document["metadata"]["name"] for document in documents if document["kind"] == "Service"}
    assert names == ({"ppo-search", "ppo-judge-model"} if case == "many" else set())
    text = json.dumps(job)
    assert set(re.findall(r"http://(ppo-[a-z-]+):", text)) == names


def test_an_own_algorithm_is_sent_to_the_head_as_a_file(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("text of mine\n")
    print_job(f"{file}::flow", ["--for", "kuberay", "--job.image", "r.example/rl:1"])
    config, job = yaml.safe_load_all(capsys.readouterr().out)
    assert config["data"] == {"mine.py": "text of mine\n"}
    assert shlex.split(job["spec"]["entrypoint"]) == ["bash", "-c", "rlflow run /etc/rlflow/mine.py::flow"]


def test_a_line_for_rays_job_server_carries_secrets_by_name(capsys):
    line = printed(capsys, "many", "ray")
    shown = subprocess.run(
        ["bash", "-c", f"ray() {{ printf '%s\\n' \"$@\"; }}; {line}"],
        capture_output=True,
        text=True,
        check=True,
        env={
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_TOKEN": 'it\'s "secret"',
            "WANDB_API_KEY": "w",
        },
    ).stdout.splitlines()
    at = shown.index("--runtime-env-json")
    assert json.loads(shown[at + 1]) == {"env_vars": {"HF_TOKEN": 'it\'s "secret"', "WANDB_API_KEY": "w"}}
    words = shown[shown.index("--") + 1 :]
    assert words[:3] == ["rlflow", "run", "ppo"]
    # otherwise the run would have taken all of them
    assert words[words.index("--service.judge_model.gpus") + 1] == "1"
    assert words[words.index("--service.search.cpus") + 1] == "4"
    # started by the run itself
    assert words[words.index("--service.search") + 1] == "rlflow serve retrieve corpus.jsonl"
    assert words[words.index("--env.url") + 1] == "{search}/retrieve"
    assert words[-2:] == ["--ray-address", "auto"]


HOSTILE = [
    "$(touch made)",
    "`touch made`",
    "${HOME}",
    "$HOME",
    "a;touch made",
    "a\ntouch made",
    "it's",
    'say "x"',
    "a\\",
    "$'\\x41'",
    "{a,b}",
    "*",
    "~",
    "!!",
    "# x",
    "a: b",
    "- a",
    "%s",
    "é\t",
    "'$(touch made)'",
    "${x:-$(touch made)}",
    "$(HF_TOKEN)",
    "",
    " ",
    "--out",
    "a && touch made",
    "<made",
    ">made",
]
SHOWING = (
    "import json, os, sys; print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if "
    "'SERVICE' in k}]))"
)


def carried_out(kind, text, tmp_path):
    """Return the words of `rlflow run` and the variables of services as the text passes them to a stand-in in
    an empty folder, the commands of services, the environment, and the folder. A stand-in replaces variables
    like Kubernetes."""
    (bin_ := tmp_path / "bin").mkdir()
    (work := tmp_path / "work").mkdir()
    for name in ("rlflow", "ray"):
        (bin_ / name).write_text(f"#!{sys.executable}\n{SHOWING}\n")
        (bin_ / name).chmod(0o755)
    environment = {
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "HOME": "/home/of-mine",
        "HF_TOKEN": "of-mine",
        "SKYPILOT_JOBGROUP_NAME": "g-7",
        "SLURM_JOB_ID": "7",
    }
    pods = (
        [
            job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
            for job in yaml.safe_load_all(text)
            if job["kind"] == "RayJob"
        ]
        if kind == "kuberay"
        else []
    )
    variables = {
        each["name"]: of_kubernetes(each["value"])
        for pod in pods
        for each in pod[0]["env"]
        if "value" in each
    }
    lines = {
        "skypilot": lambda: next(task["run"] for task in yaml.safe_load_all(text) if task["name"] == "run"),
        "kuberay": lambda: next(
            job["spec"]["entrypoint"] for job in yaml.safe_load_all(text) if job["kind"] == "RayJob"
        ),
        "ray": lambda: text,
        "slurm": lambda: text,
    }[kind]()
    shown = subprocess.run(
        ["bash", "-c", lines],
        env={**environment, **variables},
        cwd=work,
        capture_output=True,
        text=True,
        check=True,
    )
    assert list(work.iterdir()) == []
    words, found = json.loads(shown.stdout)
    commands = [of_kubernetes(each["command"][2]) for pod in pods for each in pod[1:]]
    commands += (
        [task["run"] for task in yaml.safe_load_all(text) if task["name"] == "c"]
        if kind == "skypilot"
        else []
    )
    return words[words.index("run") + 1 :], found, commands, environment, work


def of_kubernetes(text):
    """Return a value as Kubernetes passes it to a container that has the variable HF_TOKEN."""
    return re.sub(r"\$\$|\$\(HF_TOKEN\)", lambda match: "$" if match[0] == "$$" else "of-mine", text)


@pytest.mark.parametrize("kind", FORMS)
def test_no_shell_executes_hostile_flag_values(capsys, tmp_path, kind):
    values = {f"hp.v{number}": text for number, text in enumerate(HOSTILE)}
    values |= {
        "model": HOSTILE[0],
        "reward": tuple(HOSTILE[:3]),
        "hp.$(touch made)": "x",
        "data": (HOSTILE[5],),
    }
    config = tmp_path / "run.toml"
    config.write_text(
        "".join(f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in values.items())
    )
    url, of_a_secret = "http://h/$(touch${IFS}made)`touch${IFS}made`", "http://h/$(HF_TOKEN)"
    assert (
        print_job(
            "grpo",
            [
                "--config",
                str(config),
                "--for",
                kind,
                *(["--job.image", "i"] if kind != "slurm" else []),
                "--service.s",
                url,
                "--service.t",
                of_a_secret,
                "--service.c",
                f"python x {shlex.quote(HOSTILE[0])} {shlex.quote(HOSTILE[21])}",
            ],
        )
        == 0
    )
    words, variables, commands, environment, work = carried_out(kind, capsys.readouterr().out, tmp_path)
    flags = parse_flags(words[1:])
    assert {name: flags[name] for name in values} == values
    assert flags["service.s"] == url
    if kind in ("skypilot", "kuberay"):
        assert (variables["RLFLOW_SERVICE_S"], variables["RLFLOW_SERVICE_T"]) == (url, of_a_secret)
    assert len(commands) == (kind in ("skypilot", "kuberay"))
    for command in commands:
        ran = subprocess.run(
            ["bash", "-c", f"python() {{ printf '%s\\n' \"$@\"; }}; {command}"],
            env=environment,
            cwd=work,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.splitlines() == ["x", HOSTILE[0], HOSTILE[21]]
    assert list(work.iterdir()) == []


@pytest.mark.parametrize("text", ["a\0b", "\udc80"])
def test_text_that_a_command_cannot_contain_is_refused(tmp_path, text):
    with pytest.raises(PlanError, match=r"--hp.x cannot be part of a command"):
        print_job("grpo", ["--for", "ray", "--hp.x", text])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "no --for"),
        (["--for", "lsf"], "skypilot, kuberay, ray or slurm"),
        (["--for", "ray", "--job.time", "60"], "--job.time is a setting of Slurm"),
        (["--for", "slurm", "--job.time", "1 day"], "DAYS-HOURS"),
        (["--for", "slurm", "--job.seeds", "a"], "ranges of seeds"),
        (["--for", "slurm", "--job.seeds", "0-4", "--seed", "1"], "remove --seed"),
        (["--for", "slurm", "--job.image", "i"], "activate rlflow's environment"),
        (["--for", "slurm", "--job.keep", "s3://b"], "an absolute path that all nodes share"),
        (["--for", "ray", "--job.nodes", "2"], "the run uses one machine of 2"),
        (["--for", "ray", "--job.nodes", "2", "--pools", "all=2@threads"], "the run uses one machine of 2"),
        (["--for", "ray", "--job.node", "2"], "job.node"),
        (["--for", "ray", "--job.accelerators", "8xH100"], "is not NAME:COUNT"),
        (["--for", "ray", "--tracker.api_key", "0123456789abcdef"], "--tracker.api_key"),
        (["--for", "ray", "--service.s", "serve --token sk-0123456789abcdefghijklmn"], "--service.s"),
        (["--for", "ray", "--job.secret", "HF_TOKEN=hf_x"], "--job.secret with 13 characters"),
        (["--for", "kuberay"], "no --job.image"),
        (["--for", "kuberay", "--job.keep", "s3://bucket"], "the name of a PersistentVolumeClaim"),
        (["--for", "ray", "--job.keep", "claim"], "an absolute path"),
        (["--for", "skypilot", "--job.keep", "My Bucket"], "s3://BUCKET"),
        (["--for", "ray", "--job.keep", "/shared", "--out", "/elsewhere"], "remove --out"),
        (["--for", "skypilot", "--service.s", "serve", "--service.s.gpus", "1"], "no --job.accelerators"),
    ],
)
def test_an_impossible_job_is_refused(flags, told):
    with pytest.raises(PlanError) as refused:
        print_job("grpo", flags)
    assert told in str(refused.value)
    assert "0123456789abcdef" not in str(refused.value)


@pytest.mark.parametrize("kind", [*KEPT][:3])
def test_a_stored_run_resumes_under_its_name_in_its_place(capsys, kind):
    text = printed(capsys, "kept", kind)
    out = "/shared/runs" if kind == "ray" else "/rlflow-runs"
    assert f"--out {out} --name grpo --resume auto" in text
    assert "warning" not in text
    mounts = (
        [path for document in yaml.safe_load_all(text) for path in mounted(document)] if kind != "ray" else []
    )
    assert (
        mounts == {"skypilot": [(out, KEPT[kind])] * 2, "kuberay": [(out, KEPT[kind])] * 2, "ray": []}[kind]
    )


def mounted(document):
    """Return (path, mounted volume or bucket) of each mount of a document."""
    specs = [
        document,
        *(document.get("spec", {}).get("rayClusterSpec", {}).get("workerGroupSpecs", [])),
        document.get("spec", {}).get("rayClusterSpec", {}).get("headGroupSpec", {}),
    ]
    for spec in specs:
        yield from ((path, mount["source"]) for path, mount in spec.get("file_mounts", {}).items())
        pod = spec.get("template", {}).get("spec", {})
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod.get("volumes", [])
        }
        yield from (
            (mount["mountPath"], claims[mount["name"]])
            for each in pod.get("containers", [])
            for mount in each.get("volumeMounts", [])
        )


@pytest.mark.parametrize("kind", [*KEPT][:3])
def test_a_run_without_storage_causes_a_warning(capsys, kind):
    assert print_job("grpo", ["--for", kind, "--job.image", "i"]) == 0
    said = capsys.readouterr()
    for text in said:
        assert text.count("warning: nothing keeps this run") == 1
        assert "--job.keep" in text
    assert print_job("grpo", ["--for", kind, "--job.image", "i", "--out", "/shared/runs"]) == 0
    # whose pods have no disk of their own
    assert ("warning" in capsys.readouterr().out) is (kind == "kuberay")


def test_loops_of_a_job_group_have_a_deadline(capsys, tmp_path):
    """Runs in a shell where no machine ever comes and time has passed."""
    _, run, workers = yaml.safe_load_all(printed(capsys, "kept", "skypilot"))
    calls = tmp_path / "calls"
    stubs = (
        f'python() {{ echo "$*" >> {calls}; }}; ray() {{ [ "$2" = --head ]; }}; rlflow() {{ echo ran; }}; '
        'timeout() { shift; "$@"; }; sleep() { SECONDS=901; }'
    )
    for task in (run, workers):
        done = subprocess.run(
            ["bash", "-c", f"{stubs}\n{task['run']}"], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert "within 900 s" in done.stderr
    assert 'address="127.0.0.1:6379"' in calls.read_text()
    assert '"auto"' not in calls.read_text()


def test_pools_in_a_table_are_read_as_pools(tmp_path, capsys):
    (tmp_path / "run.toml").write_text("[pools]\ntrain = 8\nrollout = 8\n")
    assert (
        print_job("grpo", ["--config", str(tmp_path / "run.toml"), "--for", "ray", "--job.nodes", "2"]) == 0
    )
    assert "--pools.train 8 --pools.rollout 8 --ray-address auto" in capsys.readouterr().out


def test_pools_of_threads_join_no_ray(capsys):
    for pools, joins in (("all=2", True), ("all=2@threads", False)):
        assert print_job("grpo", ["--pools", pools, "--for", "ray"]) == 0
        assert ("--ray-address" in capsys.readouterr().out) is joins
        assert print_job("grpo", ["--pools", pools, "--for", "skypilot"]) == 0
        assert ("cluster]" in capsys.readouterr().out) is joins


def test_documents_parse_back_and_keep_their_lines():
    documents = [{"b": 1, "a": "one\ntwo\n"}, {"c": ["x: y", "- z", "yes"]}]
    text = joined(["a comment"], documents)
    assert list(yaml.safe_load_all(text)) == documents
    assert text.startswith("# a comment\nb: 1\na: |\n  one\n  two\n---\n")


def test_names_are_valid_host_names():
    assert task_of(Service(name="Judge_2")) == "judge-2"
    assert (key_of(TOKEN), key_of("HF_TOKEN")) == ("auth_token", "HF_TOKEN")
    assert target_of("My File.py::x", {"for": "ray"})[1].name == "my-file"
    assert target_of("grpo", {"for": "ray", "name": "Run_7"})[1].name == "run-7"


PARSE = """
import json, sys
from sky.utils import dag_utils
dag = dag_utils.load_job_group_from_yaml_str(sys.stdin.read(), secrets_overrides=[(name, "x") for name in sys.argv[1:]])
tasks = [[task.name, task.num_nodes, sorted(task.secrets)] for task in dag.tasks]
print(json.dumps([dag.name, dag.primary_tasks, dag.termination_delay, tasks]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", READ)
def test_skypilot_reads_the_job_group(capsys, case, lacking, tmp_path):
    if not SKYPILOT.exists():
        lacking("SkyPilot is not installed")
    text = printed(capsys, case, "skypilot")
    secrets = list(next(iter(list(yaml.safe_load_all(text))[1:]))["secrets"])
    read = subprocess.run(
        [str(SKYPILOT), "-c", PARSE, *secrets],
        input=text,
        capture_output=True,
        text=True,
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        check=False,
    )
    assert read.returncode == 0, read.stderr
    name, primary, delays, tasks = json.loads(read.stdout.splitlines()[-1])
    assert (name, primary) == ({"one": "grpo", "kept": "grpo", "many": "ppo"}[case], ["run"])
    assert delays["default"] == "0s"
    others = {
        "one": [],
        "kept": [["workers", 1]],
        "many": [["workers", 1], ["search", 1], ["judge-model", 1]],
    }
    assert [task[:2] for task in tasks] == [["run", 1], *others[case]]
    assert tasks[0][2] == sorted(secrets)
