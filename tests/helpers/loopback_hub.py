"""A fake Hugging Face hub on loopback with one repository. It answers the requests of huggingface_hub only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

COMMIT = "a1" * 20


@contextlib.contextmanager
def hub(
    name: str,
    files: dict[str, bytes],
    kind: Literal["datasets", "models"] = "datasets",
    revisions: dict[str, str] | None = None,
) -> Iterator[tuple[str, list[str]]]:
    """Serve a hub. Yield its URL and a list of the requested paths, which grows.

    Args:
        name: name of the repository.
        files: path -> content, the same in all revisions.
        kind: kind of the repository.
        revisions: revision -> commit; may change while the hub runs. None: `main` only.
    """
    requested_paths: list[str] = []
    commits = {"main": COMMIT} if revisions is None else revisions
    prefix = "datasets/" if kind == "datasets" else ""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(include_body=True)

        def do_HEAD(self) -> None:
            self._answer(include_body=False)

        def _answer(self, *, include_body: bool) -> None:
            path = self.path.partition("?")[0]
            requested_paths.append(path)
            body, headers = find(path)
            self.send_response(200 if body is not None else 404)
            for key, value in {**headers, "Content-Length": str(len(body or b""))}.items():
                self.send_header(key, value)
            self.end_headers()
            if include_body and body is not None:
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    def find(path: str) -> tuple[bytes | None, dict[str, str]]:
        api, resolve_prefix = f"/api/{kind}/{name}", f"/{prefix}{name}/resolve/"
        if path.startswith(f"{api}/tree/"):
            tree = [{"type": "file", "path": f, "size": len(b), "oid": digest(b)} for f, b in files.items()]
            return json.dumps(tree).encode(), {}
        if path == api or path.startswith(f"{api}/revision/"):
            revision = path.removeprefix(api).removeprefix("/revision/") or "main"
            if (commit := commits.get(revision)) is None:
                return (None, {}) if revision not in commits.values() else repository_info(revision)
            return repository_info(commit)
        if path.startswith(resolve_prefix):
            commit, _, file = path.removeprefix(resolve_prefix).partition("/")
            if commit in commits.values() and (body := files.get(file)) is not None:
                return body, {"ETag": f'"{digest(body)}"', "X-Repo-Commit": commit}
        return None, {}

    def repository_info(commit: str) -> tuple[bytes, dict[str, str]]:
        siblings = [{"rfilename": f} for f in files]
        return json.dumps({"id": name, "sha": commit, "siblings": siblings, "tags": []}).encode(), {}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requested_paths
    finally:
        server.shutdown()
        server.server_close()


def digest(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
