"""What holds for every artifact: round trips, and files that are not what they should be."""

from __future__ import annotations

import json

import pytest

from megatron_chameleon.artifacts.record import read_record
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import KINDS, Sample, write_samples

FORMAT_VERSION = {"training run": 2, "checkpoint": 2, "evaluation": 2}
REQUIRED_FIELD = {
    "corpus": "domains",
    "training run": "status",
    "checkpoint": "model",
    "embedding store": "recipe",
    "mixture": "weights",
    "evaluation": "protocol",
    "sweep": "points",
}


@pytest.fixture
def samples(tmp_path):
    return write_samples(tmp_path)


@pytest.fixture(params=KINDS)
def sample(samples, request) -> Sample:
    return samples[request.param]


def edit(sample: Sample, **changes: object) -> None:
    body = json.loads(sample.file.read_text())
    body.pop("checksum", None)
    body.update(changes)
    for name in [name for name, value in changes.items() if value is ...]:
        del body[name]
    sample.file.write_text(json.dumps(body, default=lambda _: None))


def refusal(sample: Sample) -> str:
    with pytest.raises(UserError) as refused:
        sample.load()
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(str(sample.file))
    return message


def test_what_is_read_is_what_was_written(sample):
    assert sample.load() == sample.written


def test_the_file_says_what_it_is_and_not_where_it_lies(sample):
    body = json.loads(sample.file.read_text(encoding="utf-8"))
    assert body["kind"] == sample.kind
    assert body["format_version"] == FORMAT_VERSION.get(sample.kind, 1)
    assert "root" not in body
    assert str(sample.file.parent) not in sample.file.read_text()


def test_a_record_has_a_checksum_unless_it_is_for_editing(sample):
    body = json.loads(sample.file.read_text())
    assert ("checksum" in body) == (sample.kind != "mixture")
    for name in body.keys() - {"kind", "format_version"}:
        if name != "checksum" and sample.kind != "mixture":
            sample.file.write_text(json.dumps(body | {name: [body[name]]}))
            assert "has changed since it was written" in refusal(sample)


def test_a_record_is_refused_where_any_part_of_it_was_changed(samples):
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
        assert "has changed since it was written" in refusal(sample)
    sample.file.write_text(json.dumps(json.loads(text)))  # white space is nothing that it says
    assert sample.load() == sample.written
    edit(sample)  # as written by a release that kept no checksum
    assert sample.load() == sample.written


def test_another_format_version_is_refused(sample):
    edit(sample, format_version=99)
    version = FORMAT_VERSION.get(sample.kind, 1)
    assert f"format_version 99, this release reads {version}; " in refusal(sample)


@pytest.mark.parametrize(
    ("kind", "added", "made_by"),
    [
        ("training run", ["mixture_phases"], "pretrain_gpt.py"),
        ("checkpoint", ["domain_samples", "mixture_phases"], "pretrain_gpt.py"),
        ("evaluation", ["left_out"], "evaluate.py perplexity"),
    ],
)
def test_a_record_of_before_is_refused_by_its_version_and_not_by_a_field(
    samples, kind, added, made_by
):
    edit(samples[kind], format_version=1, **dict.fromkeys(added, ...))
    assert refusal(samples[kind]).endswith(
        ": format_version 1, this release reads 2; use the release that wrote it, or make it "
        f"again: tools/{made_by} writes it"
    )


def test_a_file_of_another_kind_is_refused(samples):
    for sample, other in zip(samples.values(), [*list(samples.values())[1:], None], strict=True):
        if other:
            sample.file.write_bytes(other.file.read_bytes())
            assert f"is a {other.kind} file, not a {sample.kind}; " in refusal(sample)


def test_broken_json_is_told_with_its_line(sample):
    lines = sample.file.read_text().splitlines()
    sample.file.write_text("\n".join([*lines[:4], "} broken", *lines[4:]]))
    assert refusal(sample).startswith(f"{sample.file}:5: not JSON (")


def test_a_file_cut_short_is_told_with_its_line(sample):
    lines = sample.file.read_text().splitlines()
    sample.file.write_text("\n".join(lines[:-1]))
    assert f"{sample.file}:{len(lines) - 1}: not JSON" in refusal(sample)


def test_a_missing_field_is_named(sample):
    edit(sample, **{REQUIRED_FIELD[sample.kind]: ...})
    assert f"field {REQUIRED_FIELD[sample.kind]}: " in refusal(sample)


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        ("corpus", {"tokenizer": {"kind": "tokenizers"}}, "tokenizer.file"),
        ("corpus", {"dtype": "float32"}, "dtype"),
        ("corpus", {"domains": {"a": {"train": {}}}}, "domains.a.train.prefix"),
        ("training run", {"status": "lost"}, "status"),
        ("checkpoint", {"files": {"w": {"bytes": "many", "sha256": ""}}}, "files.w.bytes"),
        ("embedding store", {"hidden_size": [8]}, "hidden_size"),
        ("mixture", {"weights": {"a": "heavy"}}, "weights.a"),
        ("mixture", {"intervals": {"a": [0.1]}}, "intervals.a.1"),
        ("evaluation", {"domains": {"a": {"loss": 1.0}}}, "domains.a.tokens"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(samples, kind, changes, field):
    edit(samples[kind], **changes)
    assert f"field {field}: " in refusal(samples[kind])


def test_a_missing_file_says_what_writes_it(sample):
    sample.file.unlink()
    message = refusal(sample)
    assert "does not exist; tools/" in message
    assert message.endswith("writes it")


@pytest.mark.parametrize("content", [b"[]", b"3", b'"text"', b"null"])
def test_a_file_without_an_object_is_refused(sample, content):
    sample.file.write_bytes(content)
    assert "a JSON object is expected" in refusal(sample)


def test_a_file_that_is_not_text_is_refused(sample):
    sample.file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=f"cannot read {sample.file}: "):
        sample.load()


def test_a_folder_in_the_files_place_is_refused(sample):
    sample.file.unlink()
    sample.file.mkdir()
    with pytest.raises(UserError, match=f"cannot read {sample.file}: "):
        sample.load()


def test_a_record_written_by_hand_needs_neither_kind_nor_version(tmp_path):
    (tmp_path / "cost.json").write_text('{"flops": 3}')
    from megatron_chameleon.artifacts import Cost

    read = read_record(tmp_path / "cost.json", Cost, kind="cost", version=1, made_by="nobody")
    assert read == Cost(flops=3)
