"""What a tool was not asked to replace is as it was."""

from __future__ import annotations

import os

import pytest

from megatron_chameleon.artifacts import Cost, Mixture
from megatron_chameleon.artifacts.evaluation_result import KIND as EVALUATION
from megatron_chameleon.artifacts.mixture import KIND
from megatron_chameleon.artifacts.output_path import check_output, require_new
from megatron_chameleon.artifacts.record import write_record
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import sample_mixture, sample_result

FOREIGN = [
    b"",
    b"\x00\x01tokens",
    b"{}",
    b'{"version": "1.0", "model": {"type": "BPE"}}',
    b'{"weights": {"a": 1.0}}',
    b'{"kind": ["mixture"]}',
    b'{"kind": "corpus", "format_version": 1}',
    b'{"kind": "mixture", ',
    b"[" * 100_000,
]


@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_a_file_of_other_origin_is_not_replaced(tmp_path, content):
    path = tmp_path / "out.json"
    path.write_bytes(content)
    for refused in (
        lambda: check_output(path, KIND),
        lambda: sample_mixture().save(path),
        lambda: write_record(path, Cost(), kind="cost", version=1),
        lambda: require_new([tmp_path / "other", path], "choose another"),
    ):
        with pytest.raises(UserError, match=r"out\.json exists") as error:
            refused()
        assert "\n" not in str(error.value)
    assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/nowhere/else", path)])
def test_what_is_no_regular_file_is_not_replaced(tmp_path, make):
    path = tmp_path / "out.json"
    make(path)
    with pytest.raises(UserError, match=r"out\.json exists"):
        check_output(path, KIND)
    with pytest.raises(UserError, match=r"out\.json exists"):
        sample_mixture().save(path)
    assert not path.is_file()
    assert os.path.lexists(path)


def test_a_record_of_the_same_kind_is_replaced(tmp_path):
    path = tmp_path / "out.json"
    check_output(path, KIND)
    sample_mixture().save(path)
    check_output(path, KIND)
    with pytest.raises(UserError, match="of kind 'mixture'"):
        check_output(path, EVALUATION)
    with pytest.raises(UserError, match="of kind 'mixture'"):
        sample_result().save(path)
    Mixture.uniform(["a", "b"]).save(path)
    assert Mixture.load(path).weights == {"a": 0.5, "b": 0.5}
