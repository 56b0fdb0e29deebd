"""Says why the Hugging Face Hub didn't provide a model or a data set, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator

from rlflow.data.hub_names import HubName
from rlflow.errors import PlanError, listed, nearest

# Names of exceptions, because huggingface_hub and datasets use several HTTP libraries.
UNREACHED = {"ConnectError", "TimeoutException", "OfflineModeIsEnabled", "ConnectionError", "ProxyError"}
CUT = {"ReadError", "RemoteProtocolError", "IncompleteRead", "ProtocolError", "ChunkedEncodingError"}
FLAGS = {"model": "--model", "dataset": "--data"}
LOCAL = {"model": "a local model folder", "dataset": "a local file or folder"}
NOUNS = {"model": "model", "dataset": "data set"}
PAGES = {"model": "", "dataset": "datasets/"}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM)


def refusal(name: HubName, error: Exception) -> PlanError:
    """Return the error for a repository that couldn't be fetched, with the Hub's answer and a remedy.

    It never contains an access token.
    """
    kinds = {each.__name__ for one in _chain(error) for each in type(one).__mro__}
    status = next((code for one in _chain(error) if (code := _status(one))), None)
    if "GatedRepoError" in kinds or _says(error, "gated dataset"):
        return _gated(name, status)
    if "RevisionNotFoundError" in kinds or _says(error, "Revision '"):
        return PlanError.of(
            "hub-revision",
            f"the repository '{name.repository}' has no revision '{name.revision}'",
            found=_answer(status),
            expected="a branch, a tag or a complete commit of the repository",
            remedy=f"leave @{name.revision} out for its main branch, or copy a commit from {page(name)}/commits",
        )
    if status == 401 and _says(error, "credentials"):
        return PlanError.of(
            "hub-token",
            f"the Hub refuses the token with which '{name.repository}' was requested",
            found=_answer(status),
            expected="a valid token, or none for a public repository",
            remedy="set HF_TOKEN to a valid token, or remove it: unset HF_TOKEN, and `hf auth logout`",
        )
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return missing(name, _answer(status) if status else "no such repository")
    if unreachable(error) and status is None:
        return _unreached(name, error)
    if kinds & CUT or _says(error, "Consistency check failed"):
        return PlanError.of(
            "hub-cut",
            f"the connection was cut while '{name.repository}' was downloaded",
            found=_first_line(error),
            expected="a complete download",
            remedy="repeat the command: complete files are kept in the cache",
        )
    return _other(name, status, error)


def missing(name: HubName, answer: str) -> PlanError:
    """Return the error for a repository that is neither on the Hub nor a path on this machine."""
    parent = name.repository.partition("/")[0]
    near = [f"{parent}/{each}" for each in os.listdir(parent)] if os.path.isdir(parent) else []
    return PlanError.of(
        "hub-missing",
        f"'{name.repository}' is neither a path here nor a {NOUNS[name.kind]} on the Hub",
        found=f"{answer}; no file or folder {os.path.abspath(name.repository)}",
        expected=f"OWNER/NAME of a {NOUNS[name.kind]}, or {LOCAL[name.kind]}",
        nearest=nearest(name.repository, near),
        remedy=f"correct the name; if the repository is private, set HF_TOKEN or run `hf auth login`; or give "
        f"{FLAGS[name.kind]} {LOCAL[name.kind]}",
    )


def which_config(name: HubName, configs: Iterable[str]) -> PlanError:
    """Return the error for a data set whose config is missing from the name, or doesn't exist."""
    configs = list(configs)
    first = configs[0] if configs else "CONFIG"
    return PlanError.of(
        "hub-config",
        f"the data set '{name.repository}' has "
        + (f"no config '{name.config}'" if name.config else "several configs"),
        found=f"configs {listed(configs)}",
        expected="the name of one config after a colon",
        nearest=nearest(name.config, configs) if name.config else None,
        remedy=f"--data {name.repository}:{first}",
    )


def unreachable(error: BaseException) -> bool:
    """True if an error means that the Hub couldn't be reached."""
    return any(each.__name__ in UNREACHED for one in _chain(error) for each in type(one).__mro__)


def page(name: HubName) -> str:
    """Return the address of a repository's page."""
    return f"{_endpoint()}/{PAGES[name.kind]}{name.repository}"


def _gated(name: HubName, status: int | None) -> PlanError:
    return PlanError.of(
        "hub-gated",
        f"the repository '{name.repository}' is gated: its owner decides who may download it",
        found=_answer(status),
        expected="a token of an account that has access",
        remedy=f"ask for access on {page(name)}, then set HF_TOKEN or run `hf auth login`; or give "
        f"{FLAGS[name.kind]} {LOCAL[name.kind]}",
    )


def _unreached(name: HubName, error: Exception) -> PlanError:
    offline = any(type(one).__name__ == "OfflineModeIsEnabled" for one in _chain(error))
    found = "HF_HUB_OFFLINE is set" if offline else f"no answer from {_endpoint()}: {_first_line(error)}"
    folder = {"model": "--local-dir FOLDER", "dataset": "--repo-type dataset --local-dir FOLDER"}[name.kind]
    return PlanError.of(
        "hub-unreachable",
        f"'{name.shown}' is not in the cache, and the Hub cannot be reached",
        found=f"{found}; no file or folder {os.path.abspath(name.repository)}",
        expected="a network connection to the Hub, or the repository in the cache below HF_HOME",
        remedy=("unset HF_HUB_OFFLINE" if offline else "check the network, HF_ENDPOINT and proxies")
        + f"; or on a machine with network: hf download {name.repository} {folder}, and give "
        f"{FLAGS[name.kind]} FOLDER",
    )


def _other(name: HubName, status: int | None, error: Exception) -> PlanError:
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        found, remedy = f"{error.strerror}: {error.filename}", "free the disk, or set HF_HOME to another one"
    elif status:
        found, remedy = _answer(status), "try again later; a mirror is named by HF_ENDPOINT"
    else:
        found, remedy = _first_line(error), f"give {FLAGS[name.kind]} {LOCAL[name.kind]}"
    return PlanError.of(
        "hub-failed",
        f"'{name.shown}' could not be fetched from the Hub",
        found=found,
        expected="a complete download",
        remedy=remedy,
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _says(error: BaseException, words: str) -> bool:
    return any(words in str(one) for one in _chain(error))


def _status(error: BaseException) -> int | None:
    code = getattr(getattr(error, "response", None), "status_code", None)
    return int(code) if isinstance(code, int) else None


def _answer(status: int | None) -> str:
    return f"{_endpoint()} answered {status}" if status else f"{_endpoint()} refused it"


def _endpoint() -> str:
    """Return the Hub's address without user name and password."""
    from huggingface_hub import constants

    scheme, slashes, rest = constants.ENDPOINT.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"


def _first_line(error: BaseException) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:160]}" if first else type(error).__name__
