"""moto's S3 server in a thread of this process, with faults."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import fsspec
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

Fault = Literal["unavailable", "truncated", "denied"]


@dataclasses.dataclass
class ObjectStore:
    """A running server.

    Attributes:
        bucket: URL of an existing bucket.
        requests: method, path and range of each request.
        faults: text in a request -> fault, and how many requests with this text are to fail.
    """

    bucket: str
    requests: list[str] = dataclasses.field(default_factory=list)
    faults: dict[str, tuple[Fault, int]] = dataclasses.field(default_factory=dict)

    def put(self, files: Path, folder: str) -> str:
        """Upload all files below ``files`` to a folder of the bucket; return the folder's URL."""
        url = f"{self.bucket}/{folder}"
        for path in sorted(files.rglob("*")):
            if path.is_file():
                self.system.pipe(f"{url}/{path.relative_to(files)}", path.read_bytes())
        return url

    @property
    def system(self) -> Any:
        """fsspec's file system of the server."""
        return fsspec.filesystem("s3")

    def fail(self, text: str, fault: Fault, times: int = 10**6) -> None:
        """Let the next ``times`` requests that contain ``text`` fail."""
        self.faults[text] = fault, times

    def fault_of(self, request: str) -> Fault | None:
        """Return the fault of a request, and count it."""
        for text, (fault, times) in self.faults.items():
            if text in request and times:
                self.faults[text] = fault, times - 1
                return fault
        return None


class SilentHandler(WSGIRequestHandler):
    """Logs nothing."""

    def log(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serve() -> Iterator[ObjectStore]:
    """Run a server with an empty bucket; the environment of this process points to it."""
    moto = DomainDispatcherApplication(create_backend_app)
    store = ObjectStore("s3://data")

    def respond(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        request += f" {environ.get('HTTP_RANGE', '')}"
        store.requests.append(request)
        fault = store.fault_of(request)
        if fault in ("unavailable", "denied"):
            start("503 Slow" if fault == "unavailable" else "403 Forbidden", [])
            return []
        body = b"".join(moto(environ, start))
        # Like MinIO, list milliseconds, which are missing from the headers of an object.
        body = re.sub(rb"\.\d{3}Z</LastModified>", b".789Z</LastModified>", body)
        return [body[: len(body) // 2] if fault == "truncated" else body]

    server = make_server("127.0.0.1", 0, respond, threaded=True, request_handler=SilentHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with mock.patch.dict(os.environ, environment):
        store.system.mkdir(store.bucket)
        try:
            yield store
        finally:
            server.shutdown()
