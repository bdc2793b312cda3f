"""Every kind of artifact: round trips, damaged files, and every field mutated."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from megatron_chameleon.artifacts import Mixture, MixtureWarning
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.errors import UserError
from tests.mutations.mutate import mutate_json
from tests.unit.artifacts.artifact_samples import Sample, sample_mixture, write_samples

NUM_MUTATIONS = 60
KINDS = (
    *("corpus", "training run", "checkpoint", "embedding store", "mixture", "evaluation", "sweep"),
    *("swarm", "swarm-member", "discovered domains"),
    *("downstream evaluation", "downstream evaluation's part"),
)


@pytest.fixture(scope="module")
def all_samples(tmp_path_factory) -> dict[str, Sample]:
    samples = write_samples(tmp_path_factory.mktemp("samples"))
    assert set(samples) == set(KINDS)
    return samples


@pytest.fixture
def samples(all_samples) -> Iterator[dict[str, Sample]]:
    """The samples, whose files are restored after the test."""
    contents = {sample.file: sample.file.read_bytes() for sample in all_samples.values()}
    yield all_samples
    for file, content in contents.items():
        if file.is_dir():
            file.rmdir()
        file.write_bytes(content)


@pytest.fixture(params=KINDS)
def sample(samples, request) -> Sample:
    return samples[request.param]


def edit(sample: Sample, **changes: object) -> None:
    """Change fields of the sample's file; the value ``...`` deletes a field."""
    body = json.loads(sample.file.read_text(encoding="utf-8")) | changes
    body.pop("checksum", None)
    kept = {name: value for name, value in body.items() if value is not ...}
    sample.file.write_text(json.dumps(kept), encoding="utf-8")


def rejection(sample: Sample) -> str:
    with pytest.raises(UserError) as rejected:
        sample.load()
    message = str(rejected.value)
    assert "\n" not in message
    assert str(sample.file) in message
    return message


def test_record_is_read_as_it_was_written(sample):
    assert sample.load() == sample.written
    text = sample.file.read_text(encoding="utf-8")
    assert ("checksum" in json.loads(text)) != sample.written.EDITABLE
    assert str(sample.file.parent) not in text  # so that an artifact can be moved


def test_changed_record_is_rejected_by_its_checksum(samples):
    sample = samples["checkpoint"]
    text = sample.file.read_text()
    for before, after in (
        ('"step": 3', '"step": 4'),
        ("0.9", "0.8"),
        ('"a": 2,\n    "b": 22', '"b": 22,\n    "a": 2'),
        ('"version', '"Version'),
    ):
        assert before in text
        sample.file.write_text(text.replace(before, after))
        assert "has changed" in rejection(sample)
    sample.file.write_text(json.dumps(json.loads(text)))  # the checksum ignores white space
    assert sample.load() == sample.written


def test_damaged_file_is_rejected(sample):
    lines = sample.file.read_text(encoding="utf-8").splitlines()
    edit(sample, format_version=99, provenance=...)  # the version is checked before other fields
    assert "format_version 99" in rejection(sample)
    sample.file.write_text("\n".join([*lines[:4], "broken", *lines[4:]]), encoding="utf-8")
    assert f"{sample.file}:5: " in rejection(sample)
    deep = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    repeated, other_kind = b'{"x": 1, "x": 2}', b'{"kind": "other", "format_version": 1}'
    for content in (b"", b"[]", b"\xff\xfe\x00", deep, repeated, other_kind, b'{"x": 1e999}'):
        sample.file.write_bytes(content)
        rejection(sample)
    sample.file.unlink()
    rejection(sample)
    sample.file.mkdir()
    rejection(sample)


@pytest.mark.parametrize("kind", ["corpus", "checkpoint"])
def test_every_damaged_data_file_is_found(samples, kind):
    record = samples[kind].load()
    paths = [path for files in record.hashed_files() for path in files.sizes]
    assert len(paths) >= 4
    for path in paths:
        content = path.read_bytes()
        for damaged in (content[:-1], content + b"0"):
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=f"{re.escape(str(path))} has {len(damaged)} bytes"):
                samples[kind].load()
        path.unlink()
        with pytest.raises(UserError, match=f"cannot read {re.escape(str(path))}"):
            samples[kind].load()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UserError, match=f"{re.escape(str(path))}.* has changed since"):
            record.verify()
        path.write_bytes(content)


@pytest.mark.parametrize("kind", ["corpus", "checkpoint"])
def test_shards_of_a_verification_read_every_byte_once(samples, kind):
    record = samples[kind].load()
    for num_shards in (1, 2, 3):
        read: list[int] = []
        for shard in range(num_shards):
            before = sum(read)
            record.verify(shard, num_shards, read.append)
            assert sum(read) - before == record.bytes_to_verify(shard, num_shards)
        assert sum(read) == sum(files.bytes for files in record.hashed_files())


def test_only_a_record_of_the_same_kind_is_replaced(tmp_path):
    path = tmp_path / "out.json"

    def check_rejected() -> None:
        with pytest.raises(UserError, match=r"out\.json exists"):
            check_output(path, Mixture.KIND)
        with pytest.raises(UserError, match=r"out\.json exists"):
            sample_mixture().save(path)

    for content in (b"", b"\x00\x01tokens", b'{"kind": ["mixture"]}', b'{"kind": "corpus"}'):
        path.write_bytes(content)
        check_rejected()
        assert path.read_bytes() == content
    path.unlink()
    path.symlink_to("/nowhere/else")
    check_rejected()
    path.unlink()
    for mixture in (sample_mixture(), Mixture.uniform(["a", "b"])):
        mixture.save(path)
        check_output(path, Mixture.KIND)
        assert Mixture.load(path) == mixture


def agrees(written: Any, read: Any) -> bool:
    """Whether the values of all common fields are equal; only an integer may be read as a float."""
    if isinstance(written, dict) and isinstance(read, dict):
        return all(agrees(written[key], read[key]) for key in written.keys() & read.keys())
    if isinstance(written, list) and isinstance(read, list):
        return len(written) == len(read) and all(map(agrees, written, read))
    if isinstance(written, bool) or isinstance(read, bool):
        return written is read
    if isinstance(written, int) and isinstance(read, float):
        return float(written) == read
    return bool(written == read)


def is_accepted(sample: Sample, scratch: Path) -> bool:
    """Whether the mutated file can be read; if so, check that saving it again changes no value."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            record, message = sample.load(), ""
        except UserError as error:
            record, message = None, str(error)
    assert "\n" not in message
    if record is None:
        return False
    scratch.unlink(missing_ok=True)
    record._write(scratch)
    written, read = (json.loads(path.read_text("utf-8")) for path in (sample.file, scratch))
    ignored = ["kind", "format_version", "root"]
    ignored += ["weights" for warning in warned if warning.category is MixtureWarning]
    for name in ignored:
        written.pop(name, None)
    assert agrees(written, read)
    return True


def test_mutated_record_is_rejected_or_read_without_change(sample, tmp_path):
    edit(sample)  # remove the checksum, which would detect every mutation
    text, accepted = sample.file.read_text(encoding="utf-8"), 0
    for seed in range(NUM_MUTATIONS):
        sample.file.write_text(text, encoding="utf-8")
        mutate_json(sample.file, random.Random(seed))
        accepted += is_accepted(sample, tmp_path / "scratch")
    assert 0 < accepted < NUM_MUTATIONS


def test_optional_fields_may_be_missing(sample):
    optional = [f for f in fields(sample.written) if {f.default, f.default_factory} != {MISSING}]
    edit(sample, **{field.name: ... for field in optional})
    read = sample.load()
    for field in optional:
        default = field.default if field.default_factory is MISSING else field.default_factory()
        assert getattr(read, field.name) == default
