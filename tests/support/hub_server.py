"""A stand-in of the Hugging Face hub, which huggingface_hub's own client uploads to (by LFS, not by Xet)."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import yaml

OWNER, TOKEN = "me", "hf_" + "w" * 34


@dataclass
class Repo:
    """A model repository."""

    private: bool = False
    writable: bool = True
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Their messages."""


@dataclass
class Hub:
    """What the stand-in holds and was asked."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each."""
    is_gone: bool = False
    """From now on every connection is closed without an answer."""
    leaves_before_upload: bool = False
    """It is gone once it has said who may write."""

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """That of a process whose user is logged in here."""
        own = {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}
        rest = {key: value for key, value in os.environ.items() if key not in ("HF_TOKEN", "TRANSFORMERS_OFFLINE")}
        return rest | own | ({} if token is None else {"HF_TOKEN": token})


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *arguments: Any) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.hub.is_gone:
            self.close_connection = True
            return
        path = urlparse(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        if path.startswith("/stored/"):  # of signed addresses, which take no token
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/stored/")
            self.hub.stored[path.removeprefix("/stored/")] = body
            return self._send(200, {})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid credentials in Authorization header"})
        self._send(*self._respond(path, body))
        if path.endswith("/auth-check/write") and self.hub.leaves_before_upload:
            self.hub.is_gone = True

    do_GET = do_POST = do_PUT = _answer

    def _send(self, status: int, content: Any) -> None:
        answer = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _respond(self, path: str, body: bytes) -> tuple[int, Any]:
        hub = self.hub
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": OWNER}
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization'] or OWNER}/{asked['name']}"
            url = {"url": f"{hub.url}/{name}"}
            if name in hub.repos:
                return 409, {"error": "You already created this model repo", **url}
            if not name.startswith(f"{OWNER}/"):
                return 403, {"error": "You don't have the rights to create a model under this namespace"}
            hub.repos[name] = Repo(private=asked.get("visibility") == "private")
            return 200, url
        name, _, what = path.removeprefix("/api/models").strip("/").partition(".git/")
        if not what:
            owner, of, *rest = name.split("/")
            name, what = f"{owner}/{of}", "/".join(rest)
        repo = hub.repos.get(name)
        if repo is None:
            return 404, {"error": "Repository not found"}
        if what == "":
            return 200, {"id": name, "private": repo.private, "siblings": []}
        if what == "auth-check/write":
            return (200, {}) if repo.writable else (403, {"error": "Forbidden: no write access to this repository"})
        if what == "tree/main":
            return 200, [
                {"type": "file", "path": file, "size": len(content), "oid": "0"} for file, content in repo.files.items()
            ]
        return self._take(repo, name, what, body)

    def _take(self, repo: Repo, name: str, what: str, body: bytes) -> tuple[int, Any]:
        """The requests of an upload."""
        if what == "preupload/main":
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {file: "lfs" if file.endswith(".safetensors") else "regular" for file in files}
            return 200, {"files": [{"path": f, "uploadMode": modes[f], "shouldIgnore": False} for f in files]}
        if what == "info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            upload = [{**of, "actions": {"upload": {"href": f"{self.hub.url}/stored/{of['oid']}"}}} for of in objects]
            return 200, {"transfer": "basic", "objects": upload}
        assert what == "commit/main", what
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                repo.commits.append(value["summary"])
            elif entry["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                repo.files[value["path"]] = self.hub.stored[value["oid"]]
            else:
                assert entry["key"] == "deletedFile", entry
                del repo.files[value["path"]]
        return 200, {"commitUrl": f"{self.hub.url}/{name}/commit/{len(repo.commits)}", "commitOid": "0" * 40}

    def _validate(self, card: str) -> tuple[int, Any]:
        """As the hub, which takes no base_model that cannot be one of its own."""
        base = yaml.safe_load(card.split("---")[1]).get("base_model", "a/b")
        if base.count("/") == 1 and not base.startswith((".", "/")):
            return 200, {"warnings": [], "errors": []}
        return 400, {"errors": [{"message": f'"base_model[0]" with value "{base}" is not valid'}]}


@contextmanager
def served() -> Iterator[Hub]:
    """A hub without repositories, as long as the block runs."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
