from __future__ import annotations

import json

import pytest

from megatron_chameleon.artifacts.training_run import (
    METRICS_NAME,
    MetricsWarning,
    keep_metrics_until,
    read_metrics,
)
from tests.unit.artifacts.artifact_samples import run_in, write_metrics

RECORDS = [{"step": step, "loss": 1 / step, "domain_loss": {"ü": 0.5}} for step in (2, 4, 6, 8)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / METRICS_NAME
    write_metrics(path, RECORDS)
    return path


@pytest.mark.parametrize("cut", [0, 1, 2, 30])
def test_truncated_last_line_is_skipped(path, cut):
    path.write_bytes(path.read_bytes()[: -cut or None])
    # A line that lacks only its newline is complete.
    assert list(run_in(path.parent).metrics()) == (RECORDS if cut < 2 else RECORDS[:-1])
    keep_metrics_until(path, 6)
    with path.open("a") as stream:
        stream.write(json.dumps(RECORDS[3]) + "\n")
    assert list(read_metrics(path)) == RECORDS


DAMAGED = [
    b'{"step": 4, "domain_loss": {"\xff": 1.0}}',
    b"",
    b"\0" * 100,
    b'{"step": 4, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"step": true}',
    b'{"step": -1}',
    b'{"step": 4, "loss": 1e999}',
    b'{"step": 4, "domain_loss": [1.0]}',
]


def test_damaged_lines_are_skipped_with_one_warning(path):
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], *DAMAGED, *lines[1:]]) + b"\n")
    with pytest.warns(MetricsWarning, match=f"{len(DAMAGED)} damaged .* line 2$") as warned:
        assert list(read_metrics(path)) == RECORDS
    assert len(warned) == 1
    kept = path.read_bytes().splitlines(keepends=True)[: 2 + len(DAMAGED)]
    keep_metrics_until(path, 4)
    assert path.read_bytes() == b"".join(kept)
