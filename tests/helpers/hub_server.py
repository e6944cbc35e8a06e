"""Answers huggingface_hub's client as the Hugging Face Hub does, with faults on demand.

The server has the repositories that tests put into `HUB.repos`. It listens on a loopback port that
is chosen when this module is imported. Import it before huggingface_hub, which reads HF_ENDPOINT
when it is imported; then no test can reach the real Hub.

The answers follow https://huggingface.co/docs/hub/api, and hf_api.py, file_download.py and lfs.py
of huggingface_hub.
"""

import base64
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

# bytes from which a file is kept in LFS; the real Hub has 10 MB, or any size for *.safetensors
LFS_THRESHOLD = 1000


@dataclass
class Repo:
    """A model repository.

    Attributes:
        commits: the files of each commit, path → bytes, oldest first.
        token: the token of those who may read; None for everybody.
        gated: True if anybody sees the repository, and only the token reads files.
        private: True if it was created so.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False
    private: bool = False

    def commit(self, files: dict[str, bytes]) -> str:
        """Adds a commit and returns its 40 digits."""
        listing = [(name, hashlib.sha1(content).hexdigest()) for name, content in files.items()]
        description = repr((len(self.commits), sorted(listing)))
        sha = hashlib.sha1(description.encode()).hexdigest()
        self.commits[sha] = dict(files)
        return sha

    @property
    def head(self) -> str:
        return next(reversed(self.commits))

    @property
    def files(self) -> dict[str, bytes]:
        """Returns the files of the latest commit."""
        return self.commits[self.head]


Answer = tuple[int, bytes, dict[str, str]]
"""Status, body and headers."""


@dataclass
class Fault:
    """A fault that happens a number of times.

    Attributes:
        path: a regular expression that is searched in "METHOD /path".
        times: the number of requests that it happens to.
        status: the status of the answer, which then has no content.
        headers: the headers of that answer.
        cut: the number of bytes after which the body ends.
        corrupt: True to flip a bit of the body.
        seconds: the time to wait before every 64 KiB of the body.
        call: a function to call before the answer.
        change: makes another answer of (status, body, headers).
    """

    path: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    corrupt: bool = False
    seconds: float = 0.0
    call: Callable[[], None] | None = None
    change: "Callable[[Answer], Answer] | None" = None


@dataclass
class Request:
    """A request and the answer.

    Attributes:
        line: "METHOD /path".
        range: the Range header.
        token: the token in the Authorization header.
        status: the status of the answer.
    """

    line: str
    range: str | None
    token: str | None
    status: int = 0


class Hub:
    """The server and its memory.

    Attributes:
        repos: the repositories by their ids.
        faults: the faults that are still to happen.
        requests: all requests, in order.
        objects: the LFS objects by their sha256.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        # another host to clients, to which they send no token
        self.cdn_url = self.url.replace("127.0.0.1", "localhost")
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def clear(self) -> None:
        self.repos.clear()
        self.faults.clear()
        self.requests.clear()
        self.objects.clear()

    def count(self, pattern: str) -> int:
        """Returns the number of requests whose line matches a pattern."""
        return sum(re.search(pattern, request.line) is not None for request in self.requests)

    def fault_for(self, line: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.path, line):
                    fault.times -= 1
                    return fault
        return None


class _RefusedError(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for an acknowledgement

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing; requests are recorded."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.request_record = Request(f"{self.command} {path}", self.headers.get("Range"), token)
        HUB.requests.append(self.request_record)
        self.fault = HUB.fault_for(self.request_record.line)
        if self.fault is not None and self.fault.call is not None:
            self.fault.call()
        try:
            if self.fault is not None and self.fault.status is not None:
                self._send(self.fault.status, b"{}", self.fault.headers)
            else:
                self._route(path, token)
        except _RefusedError as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self._send(refused.status, json.dumps({"error": refused.message}).encode(), headers)

    def _route(self, path: str, token: str | None) -> None:
        for pattern, method in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match is not None:
                self.token = token
                method(self, **match.groupdict())
                return
        raise _RefusedError(404, "EntryNotFound", f"no such page: {path}")

    def _repo(self, repo: str, token: str | None, *, files: bool = False) -> Repo:
        found = HUB.repos.get(repo)
        if found is None or (found.token is not None and found.token != token and not found.gated):
            raise _RefusedError(401, "RepoNotFound", "Repository not found")
        if files and found.gated and found.token != token:
            status = 401 if token is None else 403
            message = f"Access to model {repo} is restricted. Visit the page to ask for access."
            raise _RefusedError(status, "GatedRepo", message)
        return found

    def _commit(self, repo: Repo, revision: str) -> str:
        commit = repo.head if revision in ("main", repo.head) else revision
        if commit not in repo.commits:
            raise _RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def info(self, repo: str, revision: str | None = None) -> None:
        found = self._repo(repo, self.token)
        commit = self._commit(found, revision or "main")
        keys = ("rfilename", "blobId", "sha256")
        files = found.commits[commit]
        siblings = [_entry(name, content, keys) for name, content in files.items()]
        self._json(
            {
                "id": repo,
                "modelId": repo,
                "sha": commit,
                "private": found.private,
                "siblings": siblings,
            }
        )

    def tree(self, repo: str, revision: str, folder: str | None = None) -> None:
        found = self._repo(repo, self.token)
        files = found.commits[self._commit(found, revision)]
        entries = []
        for name, content in files.items():
            if name.startswith(folder or ""):
                keys = ("path", "oid", "oid")
                entries.append({"type": "file", **_entry(name, content, keys)})
        self._json(entries)

    def resolve(self, repo: str, revision: str, name: str) -> None:
        found = self._repo(repo, self.token, files=True)
        commit = self._commit(found, revision)
        content = found.commits[commit].get(name)
        headers = {"X-Repo-Commit": commit}
        if content is None:
            raise _RefusedError(404, "EntryNotFound", "Entry not found")
        if len(content) < LFS_THRESHOLD:
            self._content(content, headers | {"ETag": f'"{_blob(content)}"'})
            return
        sha256 = hashlib.sha256(content).hexdigest()
        HUB.objects[sha256] = content
        headers |= {
            "X-Linked-Etag": f'"{sha256}"',
            "X-Linked-Size": str(len(content)),
            "ETag": '"of-the-redirect"',
        }
        self._send(302, b"", headers | {"Location": f"{HUB.cdn_url}/cdn/{sha256}/{name}"})

    def cdn(self, sha256: str) -> None:
        self._content(HUB.objects[sha256], {"ETag": '"of-the-cdn"'})

    def _content(self, content: bytes, headers: dict[str, str]) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            self._send(200, content, headers | {"Accept-Ranges": "bytes"})
            return
        start = int(wanted[1])
        last = int(wanted[2] or len(content))
        stop = min(last + 1, len(content))
        if start >= len(content):
            self._send(416, b"", headers | {"Content-Range": f"bytes */{len(content)}"})
            return
        headers = headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        self._send(206, content[start:stop], headers)

    def create(self) -> None:
        wanted = json.loads(self.body)
        owner = wanted.get("organization") or "me"
        repo = f"{owner}/{wanted['name']}"
        if self.token is None:
            raise _RefusedError(401, "", "Invalid username or password.")
        if repo in HUB.repos:
            message = "You already created this model repo"
            self._json({"error": message, "url": f"{HUB.url}/{repo}"}, 409)
            return
        is_private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        HUB.repos[repo] = Repo(private=is_private, token=self.token)
        HUB.repos[repo].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self._json({"url": f"{HUB.url}/{repo}", "name": repo, "id": repo})

    def whoami(self) -> None:
        if self.token is None:
            raise _RefusedError(401, "", "Invalid username or password.")
        auth = {"accessToken": {"role": "write"}}
        self._json({"name": "me", "type": "user", "orgs": [], "auth": auth})

    def validate_card(self) -> None:
        content = json.loads(self.body)["content"]
        errors = [] if content.startswith("---\n") else [{"message": "no front matter"}]
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def preupload(self, repo: str) -> None:
        found = self._repo(repo, self.token)
        files = []
        for file in json.loads(self.body)["files"]:
            before = found.files.get(file["path"])
            entry = {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] >= LFS_THRESHOLD else "regular",
                "shouldIgnore": False,
                "oid": None if before is None else _blob(before),
            }
            files.append(entry)
        self._json({"files": files, "commitOid": found.head})

    def batch(self, repo: str) -> None:
        self._repo(repo, self.token)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in HUB.objects:
                place = {"href": f"{HUB.url}/upload/{wanted['oid']}", "header": {}}
                entry["actions"] = {"upload": place}
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects})

    def upload(self, sha256: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != sha256:
            raise _RefusedError(400, "", "not the object that was announced")
        HUB.objects[sha256] = self.body
        self._send(200, b"", {})

    def create_commit(self, repo: str) -> None:
        found = self._repo(repo, self.token)
        files = dict(found.files)
        for line in self.body.splitlines():
            change = json.loads(line)
            value = change["value"]
            if change["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif change["key"] == "lfsFile":
                files[value["path"]] = HUB.objects[value["oid"]]
            elif change["key"] == "deletedFile":
                del files[value["path"]]
        sha = found.commit(files)
        self._json(_commit_answer(sha, f"{HUB.url}/{repo}/commit/{sha}"))

    def _json(self, content: Any, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        fault = self.fault or Fault("")
        if fault.change is not None:
            status, body, headers = fault.change((status, body, headers))
        self.request_record.status = status
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.corrupt:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        body = body[: fault.cut]
        for start in range(0, len(body), 2**16):
            time.sleep(fault.seconds)
            try:
                self.wfile.write(body[start : start + 2**16])
            except OSError:
                return  # the client has left
        if fault.cut is not None:
            self.close_connection = True


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_REVISION = r"(?P<revision>[\w.-]+)"
_ROUTES: list[tuple[str, Callable[..., None]]] = [
    (rf"/api/models/{_REPO}(?:/revision/{_REVISION})?", _Handler.info),
    (rf"/api/models/{_REPO}/tree/{_REVISION}(?:/(?P<folder>.+))?", _Handler.tree),
    (rf"/api/models/{_REPO}/preupload/[\w.-]+", _Handler.preupload),
    (rf"/api/models/{_REPO}/commit/[\w.-]+", _Handler.create_commit),
    (rf"/{_REPO}/resolve/{_REVISION}/(?P<name>.+)", _Handler.resolve),
    (rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"/cdn/(?P<sha256>\w+)/.+", _Handler.cdn),
    (r"/upload/(?P<sha256>\w+)", _Handler.upload),
    (r"/api/repos/create", _Handler.create),
    (r"/api/whoami-v2", _Handler.whoami),
    (r"/api/validate-yaml", _Handler.validate_card),
]


def _commit_answer(sha: str, url: str) -> dict[str, Any]:
    return {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""}


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes, keys: tuple[str, str, str]) -> dict[str, Any]:
    """Returns an entry of a listing, whose keys for path, blob and LFS object differ."""
    path, blob, of_lfs = keys
    entry: dict[str, Any] = {path: name, "size": len(content), blob: _blob(content)}
    if len(content) >= LFS_THRESHOLD:
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {of_lfs: sha256, "size": len(content), "pointerSize": 134}
    return entry


HUB = Hub()
_HOME = tempfile.TemporaryDirectory(prefix="nf4conv-tests-hf-")
os.environ |= {"HF_ENDPOINT": HUB.url, "HF_HOME": _HOME.name, "HF_HUB_DISABLE_TELEMETRY": "1"}
os.environ["XDG_CACHE_HOME"] = _HOME.name  # nothing of an earlier run is found in ours
os.environ["HF_HUB_DISABLE_XET"] = "1"  # uploads then go by LFS, as without the package hf_xet
for _name in (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
):
    os.environ.pop(_name, None)
