"""A local server with the functions of the Hugging Face hub that read data sets and models.

Repositories are <root>/<owner>/<name>, with one commit each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "c0ffee" + "0" * 34


@contextlib.contextmanager
def serve(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of the hub and the list of its requests."""
    requests: list[str] = []
    handler = type("Handler", (_HubHandler,), {"hub": (root, requests)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


class _HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: tuple[Path, list[str]]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        length = int(self.headers["Content-Length"] or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        root, requests = self.hub
        path = unquote(urlparse(self.path).path)
        requests.append(f"{self.command} {path} {self.headers.get('Range') or ''}".strip())
        head, _, rest = path.partition("/datasets/")
        if not rest:  # a model
            head, rest = ("/api", path[12:]) if path.startswith("/api/models/") else ("", path[1:])
        owner, name, *parts = [*rest.split("/"), "", ""]
        repository = root / owner / name
        if not rest or not name or not repository.is_dir():
            self._refuse(404, "RepoNotFound")
        elif parts[1] not in ("", "main", COMMIT):  # requests for a repository have no revision
            self._refuse(404, "RevisionNotFound")
        elif head == "/api":
            self._describe(repository, parts, body)
        else:
            self._send_file(repository / "/".join(parts[2:-2]))

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _describe(self, repository: Path, parts: list[str], body: dict[str, Any]) -> None:
        """Return the API's JSON for the commit, a folder, or the requested paths."""
        what, folder = parts[0], "/".join(parts[2:-2])
        if what in ("", "revision"):
            files = [{"rfilename": path.name} for path in repository.iterdir() if path.is_file()]
            info = {"id": repository.name, "sha": COMMIT, "siblings": files}
            self._send(json.dumps(info).encode())
            return
        found = {path.relative_to(repository).as_posix(): path for path in repository.rglob("*")}
        if what == "tree":
            names = [name for name in found if name.startswith(f"{folder}/" if folder else "")]
        else:
            paths = body["paths"]
            names = list(found.keys() & ({paths} if type(paths) is str else set(paths)))
        self._send(json.dumps([_entry(name, found[name]) for name in sorted(names)]).encode())

    def _send_file(self, path: Path) -> None:
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        data, status = path.read_bytes(), 200
        headers = {"ETag": f'"{_object_id(path)}"', "Accept-Ranges": "bytes"}
        if wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            end = min(int(last or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{end}/{len(data)}"
            data, status = data[int(first) : end + 1], 206
        self._send(data, status, headers)

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"{}", status, {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(name: str, path: Path) -> dict[str, Any]:
    if path.is_dir():
        return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
    return {"type": "file", "oid": _object_id(path), "size": path.stat().st_size, "path": name}


def _object_id(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
