"""A small Hugging Face Hub on loopback: the routes that huggingface_hub and datasets use."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import huggingface_hub

NOWHERE = "http://127.0.0.1:9"  # no server listens on the port of the discard protocol
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz01234567"
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/(.+))?")
RESOLVE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit → path → bytes
    refs: dict[str, str] = field(default_factory=dict)  # branch or tag → commit
    gated: bool = False  # files need TOKEN
    cut: set[str] = field(default_factory=set)  # files whose transfer ends in the middle

    def commit(self, files: dict[str, bytes | str], branch: str = "main") -> str:
        """Add a commit to a branch, and return its digits."""
        data = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
        sha = hashlib.sha1(repr(sorted(data.items())).encode()).hexdigest()
        self.commits[sha] = data
        self.refs[branch] = sha
        return sha

    def resolved(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


class Hub:
    """Repositories by (kind, name), and the requests for them."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[str] = []  # METHOD path
        self.url = ""

    def model(self, name: str, folder: Path | None = None, **files: bytes | str) -> Repository:
        return self._add("models", name, folder, files)

    def dataset(self, name: str, files: dict[str, bytes | str]) -> Repository:
        return self._add("datasets", name, None, files)

    def _add(self, kind: str, name: str, folder: Path | None, files: dict[str, bytes | str]) -> Repository:
        read = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} if folder else {}
        made = self.repositories[kind, name] = Repository()
        made.commit({**read, **files})
        return made

    def asked(self, words: str) -> int:
        """Return how many requests contain the words."""
        return sum(words in each for each in self.requests)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a Hub on a free port of loopback. Its ``url`` is its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._respond(body=False)

        def do_GET(self) -> None:
            self._respond(body=True)

        def do_POST(self) -> None:
            self._respond(body=True)

        def _respond(self, body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            length = int(self.headers.get("Content-Length") or 0)
            sent = self.rfile.read(length).decode()
            path = unquote(urlsplit(self.path).path)
            if api := API.fullmatch(path):
                kind, name, route, rest = api.groups()
                self._api(kind, name, route or "revision", rest or "main", sent)
            elif found := RESOLVE.fullmatch(path):
                self._file(found[1] or "models", *found.groups()[1:], body=body)
            else:
                self._error(404, "EntryNotFound")

        def _repository(self, kind: str, name: str) -> Repository | None:
            token = self.headers.get("Authorization")
            if token and token != f"Bearer {TOKEN}":
                self._error(401, "", "Invalid credentials in Authorization header")
            elif (kind, name) not in hub.repositories:
                self._error(401, "RepoNotFound", "Repository not found")
            else:
                return hub.repositories[kind, name]
            return None

        def _api(self, kind: str, name: str, route: str, rest: str, sent: str) -> None:
            if (repository := self._repository(kind, name)) is None:
                return None
            revision, _, folder = rest.partition("/")
            if (sha := repository.resolved(revision)) is None:
                return self._error(404, "RevisionNotFound", "Invalid rev id")
            files = repository.commits[sha]
            if route == "revision":
                siblings = [{"rfilename": path} for path in files]
                return self._json(
                    {"_id": "0", "id": name, "sha": sha, "siblings": siblings, "private": False}
                )
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                for path, data in files.items()
            ]
            if route == "paths-info":
                asked = parse_qs(sent).get("paths") or json.loads(sent or "{}").get("paths", [])
                return self._json([each for each in entries if each["path"] in asked])
            if folder and not any(path.startswith(f"{folder}/") for path in files):
                return self._error(404, "EntryNotFound")
            depth = folder.count("/") + 1 if folder else 0
            below = [each for each in entries if str(each["path"]).startswith(folder)]
            if "recursive=true" not in self.path.lower():
                folders = {"/".join(str(each["path"]).split("/")[: depth + 1]) for each in below}
                below = [each for each in below if each["path"] in folders]
                folders -= {str(each["path"]) for each in below}
                below += [{"type": "directory", "path": path, "oid": "0", "size": 0} for path in folders]
            return self._json(below)

        def _file(self, kind: str, name: str, revision: str, path: str, body: bool) -> None:
            if (repository := self._repository(kind, name)) is None:
                return None
            if repository.gated and not self.headers.get("Authorization"):
                return self._error(401, "GatedRepo", f"Access to {kind} {name} is restricted")
            if (sha := repository.resolved(revision)) is None:
                return self._error(404, "RevisionNotFound", "Invalid rev id")
            data = repository.commits[sha].get(path)
            if data is None:
                return self._error(404, "EntryNotFound", commit=sha)
            first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if first else 200)
            self.send_header("ETag", f'"{_etag(data)}"')
            self.send_header("X-Repo-Commit", sha)
            self.send_header("Content-Length", str(len(data) - first))
            self.end_headers()
            if body and path in repository.cut:
                self.wfile.write(data[first : first + (len(data) - first) // 2])
                self.close_connection = True
            elif body:
                self.wfile.write(data[first:])
            return None

        def _json(self, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _error(self, status: int, code: str, message: str = "", commit: str = "") -> None:
            self.send_response(status)
            for name, value in {
                "X-Error-Code": code,
                "X-Error-Message": message,
                "X-Repo-Commit": commit,
            }.items():
                if value:
                    self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def reach(monkeypatch, url: str) -> None:
    """Set in this process what HF_ENDPOINT sets when the packages are imported."""
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
