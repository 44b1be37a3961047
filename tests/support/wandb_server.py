"""A stand-in of W&B's server, which W&B's own client talks to."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StandIn(http.server.BaseHTTPRequestHandler):
    """Answers W&B's GraphQL requests as the test says."""

    answers: dict[str, Any]
    """What a request's text holds -> status and content, or what makes them from the request; the first that fits."""
    requests: list[dict[str, Any]]
    sent: list[dict[str, Any]]
    """What was streamed to a run's files: its history and more."""

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status, answer = 404, b"{}"
        if self.path == "/graphql":
            request = json.loads(body)
            self.requests.append(request)
            name = next(name for name in self.answers if name in request["query"])
            answer_of = self.answers[name]
            status, content = answer_of(request) if callable(answer_of) else answer_of
            answer = json.dumps(content).encode()
        elif self.path.endswith("/file_stream"):
            self.sent.append(json.loads(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body))
            status = 200
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


_PERSON = {"id": "VXNlcjox", "username": "me", "entity": "team", "email": "", "flags": "{}", "teams": {"edges": []}}
VIEWER = (200, {"data": {"viewer": _PERSON}})
_PROJECT = {"id": "cA==", "name": "project", "entity": {"id": "ZQ==", "name": "team"}}
_RUN = {"id": "cg==", "name": "run", "displayName": "run", "config": "{}", "historyLineCount": 0, "project": _PROJECT}
_SERVER = {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []}
TAKES_RUNS = {
    "upsertBucket": (200, {"data": {"upsertBucket": {"bucket": _RUN, "inserted": True}}}),
    "CreateRunFiles": (200, {"data": {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": []}}}),
    "": (200, {"data": {"viewer": _PERSON, "serverInfo": _SERVER}}),
}
"""Answers of a server that takes runs."""


@contextmanager
def served(answers: dict[str, Any]) -> Iterator[tuple[str, type[StandIn]]]:
    """Its address and its class, of this context alone; behind the context nobody listens there."""
    handler = type("Handler", (StandIn,), {"answers": answers, "requests": [], "sent": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()
