"""A local server of the Hugging Face hub's API, as far as the upload of a folder uses it.

Protocol: huggingface_hub's requests, and Git LFS
(https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md).
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flask
from werkzeug.serving import make_server

from tests.object_store import SilentHandler

TOKEN = "hf_test"


@dataclasses.dataclass
class Repository:
    """SHA-256 of the files after the last commit, and the paths that each commit changed."""

    private: bool
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    commits: list[dict[str, list[str]]] = dataclasses.field(default_factory=list)


class Hub:
    """The state of the server.

    Attributes:
        address: URL of the server.
        xet_store: folder in which the Xet client stores files instead of uploading them.
        repositories: name -> repository. Files called ``*.safetensors`` are large files, which are
            uploaded by Git LFS or Xet.
        objects: SHA-256 -> size of a file uploaded by Git LFS.
        failures: pattern of "METHOD PATH" -> HTTP status of the response, or 0 to close the
            connection after half of the request's body.
    """

    def __init__(self, xet_store: Path) -> None:
        self.address, self.xet_store = "", xet_store
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, int] = {}
        self.failures: dict[str, int] = {}


@contextmanager
def hub_server(xet_store: Path) -> Iterator[Hub]:
    """Serve a hub without repositories, whose only token is ``TOKEN``."""
    hub, app = Hub(xet_store), flask.Flask(__name__)

    @app.before_request
    def fail() -> Any:
        request = flask.request
        name = f"{request.method} {request.path}"
        status = next((s for pattern, s in hub.failures.items() if re.search(pattern, name)), None)
        if status == 0:
            request.stream.read((request.content_length or 0) // 2)
            request.environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        if status is not None:
            return {"error": f"failure {status}"}, status or 500
        # The URL of an LFS object is signed and needs no token.
        if (
            request.endpoint != "upload"
            and request.headers.get("Authorization") != f"Bearer {TOKEN}"
        ):
            return {"error": "Invalid username or password."}, 401
        return None

    @app.get("/api/whoami-v2")
    def whoami() -> Any:
        return {"type": "user", "name": "someone"}

    @app.post("/api/repos/create")
    def create() -> Any:
        body = flask.request.json
        name = f"{body['organization']}/{body['name']}"
        answer = {"url": f"{hub.address}/{name}"}
        if name in hub.repositories:
            return {"error": "You already created this model repo", **answer}, 409
        hub.repositories[name] = Repository(body.get("visibility") == "private")
        return answer

    @app.get("/api/models/<owner>/<name>")
    def info(owner: str, name: str) -> Any:
        private = hub.repositories[f"{owner}/{name}"].private
        return {"id": f"{owner}/{name}", "private": private}

    @app.get("/api/models/<owner>/<name>/tree/main")
    def tree(owner: str, name: str) -> Any:
        files = hub.repositories[f"{owner}/{name}"].files
        return [
            {"type": "file", "path": path, "size": 0, "oid": digest}
            for path, digest in files.items()
        ]

    @app.post("/api/validate-yaml")
    def validate_card() -> Any:
        return {"errors": [], "warnings": []}

    @app.post("/api/models/<owner>/<name>/preupload/main")
    def preupload(owner: str, name: str) -> Any:
        paths = [file["path"] for file in flask.request.json["files"]]
        modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
        files = [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]
        return {"files": files}

    @app.get("/api/models/<owner>/<name>/xet-write-token/main")
    def xet(owner: str, name: str) -> Any:
        return {"casUrl": f"local://{hub.xet_store}", "accessToken": "", "exp": 1 << 32}

    @app.post("/<owner>/<name>.git/info/lfs/objects/batch")
    def batch(owner: str, name: str) -> Any:
        objects = flask.request.json["objects"]
        for each in objects:
            if each["oid"] not in hub.objects:
                each["actions"] = {"upload": {"href": f"{hub.address}/lfs/{each['oid']}"}}
        return {"transfer": "basic", "objects": objects}

    @app.put("/lfs/<oid>")
    def upload(oid: str) -> Any:
        content = flask.request.get_data()
        assert hashlib.sha256(content).hexdigest() == oid
        hub.objects[oid] = len(content)
        return ""

    @app.post("/api/models/<owner>/<name>/commit/main")
    def commit(owner: str, name: str) -> Any:
        _, *lines = map(json.loads, flask.request.get_data().splitlines())
        repository, changes = hub.repositories[f"{owner}/{name}"], dict[str, list[str]]()
        for key, value in ((line["key"], line["value"]) for line in lines):
            path = value["path"]
            changes.setdefault(key, []).append(path)
            if key == "deletedFile":
                del repository.files[path]
            elif key == "lfsFile":
                assert any(hub.xet_store.iterdir()) or hub.objects[value["oid"]] == value["size"]
                repository.files[path] = value["oid"]
            else:
                content = base64.b64decode(value["content"])
                repository.files[path] = hashlib.sha256(content).hexdigest()
        repository.commits.append(changes)
        number = len(repository.commits)
        url = f"{hub.address}/{owner}/{name}/commit/{number}"
        return {"commitUrl": url, "commitOid": f"{number:040}"}

    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=SilentHandler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
