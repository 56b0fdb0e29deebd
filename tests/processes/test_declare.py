import pytest

from rlflow.config.flags import parse_flags, read_toml
from rlflow.errors import PlanError
from rlflow.processes.declare import Service, in_place, nowhere, split_services

COMMAND = "rlflow serve retrieve 'my corpus.jsonl' --port {port}"


def problem(**values):
    with pytest.raises(PlanError) as error:
        split_services({name.replace("__", "."): value for name, value in values.items()})
    return str(error.value)


def test_a_flag_and_a_table_declare_the_same_service(tmp_path):
    written = parse_flags(
        ["--service.search", COMMAND, "--service.search.wait", "3", "--service.search.gpus=1", "--lr", "1e-3"]
    )
    (tmp_path / "run.toml").write_text(
        f'lr = "1e-3"\n[service.search]\nrun = "{COMMAND}"\nwait = 3\ngpus = 1\n'
    )
    expected = ((Service(name="search", run=COMMAND, wait=3.0, gpus=1),), {"lr": "1e-3"})
    assert split_services(written) == split_services(read_toml(tmp_path / "run.toml")) == expected


def test_one_line_of_a_table_declares_a_service(tmp_path):
    (tmp_path / "run.toml").write_text('[service]\nsearch = "serve {port}"\njudge = "http://far:8000"\n')
    services, _ = split_services(read_toml(tmp_path / "run.toml"))
    assert [(each.name, each.external, each.variable) for each in services] == [
        ("search", False, "RLFLOW_SERVICE_SEARCH"),
        ("judge", True, "RLFLOW_SERVICE_JUDGE"),
    ]


def test_a_command_contains_its_port_and_the_urls_of_others():
    service = Service(name="judge", run=f"{COMMAND} --retriever {{search}}/retrieve --format {{other}}")
    words = service.command(8000, {"search": "http://127.0.0.1:9"})
    assert words == [
        "rlflow",
        "serve",
        "retrieve",
        "my corpus.jsonl",
        "--port",
        "8000",
        "--retriever",
        "http://127.0.0.1:9/retrieve",
        "--format",
        "{other}",
    ]


def test_any_flag_may_contain_a_url_and_other_braces_stay():
    urls = {"judge": "http://h:1"}
    assert in_place(("{judge}/get_reward:0.5", "task"), urls) == ("http://h:1/get_reward:0.5", "task")
    assert in_place("Q: {prompt} A:", urls) == "Q: {prompt} A:"
    assert in_place(3, urls) == 3


def test_a_declaration_is_validated_without_starting_anything():
    services, _ = split_services({"service.my_judge": "serve", "service.far": "https://far/judge/"})
    assert nowhere(services) == {"my_judge": "http://my-judge.invalid", "far": "https://far/judge"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"service__search__wait": 3}, "service 'search' has no command"),
        ({"service__x": "serve 'corpus"}, "close the quotes"),
        ({"service__port": "serve"}, "--service.port is not a valid service name"),
        ({"service__1x": "serve"}, "--service.1x is not a valid service name"),
        (
            {"service__a": "serve", "service__A": "serve"},
            "services 'a' and 'A' differ only in upper and lower case",
        ),
        ({"service__a": "serve", "service__a__wiat": 3}, "nearest:  wait"),
        ({"service__a": "serve", "service__a__cpus": 0}, "the setting 'service.a.cpus' does not fit"),
        ({"service__a": "serve", "service__a__health": "health"}, "--service.a.health /health"),
        ({"service__a": "http://"}, "the URL of service 'a' is invalid"),
        ({"service__a": "http://h:x"}, "the URL of service 'a' is invalid"),
        ({"service__a": "http://h --port 3"}, "the URL of service 'a' is invalid"),
        ({"service__a": "http://h", "service__a__gpus": 1}, "remove --service.a.gpus"),
        ({"service__judge": "serve", "reward": ("task", "{jugde}/get_reward")}, "nearest:  judge"),
        ({"service__judge": "serve", "reward": ("good={jugde}/get_reward:0.7",)}, "nearest:  judge"),
        ({"service__judge": "serve", "env": "openenv:{jugde}"}, "nearest:  judge"),
        ({"service__judge": "serve --of={serach}/retrieve", "service__search": "serve"}, "nearest:  search"),
        ({"env__corpus": "{search}"}, "declare it: --service.search COMMAND"),
        ({"service__a": "serve {a}/x"}, "the command of service 'a' needs itself"),
        (
            {"service__a": "serve {b}", "service__b": "serve {c}", "service__c": "serve --of={a}/x"},
            "need one another",
        ),
        ({"service__judge": "serve {serach}/retrieve", "service__search": "serve"}, "nearest:  search"),
    ],
)
def test_an_impossible_declaration_is_refused_with_a_remedy(values, said):
    assert said in problem(**values)


def test_a_users_name_in_a_url_is_not_repeated():
    assert "hunter2" not in problem(service__a="http://me:hunter2@host")


def test_all_problems_are_reported_at_once():
    text = problem(service__a="serve 'x", service__b__wait=-1, service__b="serve", reward=("{c}/get_reward",))
    assert "service 'a'" in text
    assert "service.b.wait" in text
    assert "--reward names" in text
