"""A hub that cannot be reached, or says nothing."""

from __future__ import annotations

import http.server
import socket
import threading

import datasets
import pytest
from huggingface_hub import close_session, constants

from megatron_chameleon.evaluation.downstream.hub import TRIES, Hub
from megatron_chameleon.evaluation.downstream.tasks import CannotAskError, TaskLibrary


@pytest.fixture
def point_to(monkeypatch):
    """Lets the hub be at a port of this machine."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()

    def point(port):
        address = f"http://127.0.0.1:{port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    yield point
    close_session()


@pytest.fixture
def silent_port():
    """Takes connections, and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.fixture
def asked():
    """The paths that the answering hub was asked for."""
    return []


@pytest.fixture
def answering_port(asked):
    """Answers that it has nothing."""

    class Nothing(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_arguments):
            """Be quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


def test_a_hub_that_answers_is_asked_by_datasets(point_to, answering_port, asked):
    point_to(answering_port)
    hub = Hub()
    with hub.reading("allenai/sciq"):
        assert not constants.HF_HUB_OFFLINE
    assert hub.problem == ""
    assert asked == ["/datasets/allenai/sciq/resolve/main/README.md"]


def test_a_hub_that_says_nothing_is_not_asked_again(point_to, silent_port):
    point_to(silent_port)
    hub = Hub()
    with hub.reading("allenai/sciq"):
        assert constants.HF_HUB_OFFLINE
        assert datasets.config.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    assert f"http://127.0.0.1:{silent_port} does not answer (ReadTimeout" in hub.problem


def test_tasks_say_how_to_do_without_the_hub(point_to, monkeypatch, tmp_path):
    calls = []

    def refuse(*address, **_more):
        calls.append(address)
        raise OSError("there is no network")

    point_to(9)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    library = TaskLibrary(["sciq", "piqa"], None)
    for task in ("sciq", "piqa"):
        with pytest.raises(
            CannotAskError,
            match=r"does not answer \(\w+: .*\), and the data set is not kept here; .* --data-dir",
        ):
            library.load(task)
    assert len(calls) == TRIES


def test_where_the_hub_is_not_to_be_asked_it_is_not(point_to, monkeypatch, tmp_path):
    point_to(9)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(CannotAskError, match=r"OfflineModeIsEnabled.*--data-dir"):
        TaskLibrary(["sciq"], None).load("sciq")
