from __future__ import annotations

import hashlib
import os
import resource
import signal
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts.files import (
    put_all_back,
    put_back,
    remove_replaced,
    replace_folder,
    replacing,
    sha256_of_files,
    sha256_of_json,
    write_json,
)
from megatron_chameleon.errors import UserError


def test_a_file_is_replaced_only_when_the_block_has_ended(tmp_path):
    path = tmp_path / "deeper" / "file"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == path.parent  # another file system could not rename it
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, FileNotFoundError, UserError])
@pytest.mark.parametrize("before", ["old", None])
def test_a_block_that_raises_leaves_everything_as_it_was(tmp_path, error, before):
    path = tmp_path / "file"
    if before:
        path.write_text(before)

    def write_half():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error("of the block")

    with pytest.raises(error, match="of the block"):
        write_half()
    assert [p.name for p in tmp_path.iterdir()] == (["file"] if before else [])
    assert not before or path.read_text() == before


def test_a_folder_that_cannot_be_made_is_the_users_to_put_right(tmp_path):
    (tmp_path / "file").write_text("no folder")
    path = tmp_path / "file" / "out.json"
    with pytest.raises(UserError, match=f"cannot write {path}: .*choose another folder"):
        write_json(path, {})
    # The system's own folders refuse even root.
    with pytest.raises(UserError, match=r"cannot write /proc/nowhere/out\.json: "):
        write_json(Path("/proc/nowhere/out.json"), {})


def test_a_folder_in_the_files_place_is_not_touched(tmp_path):
    path = tmp_path / "out.json"
    path.mkdir()
    with pytest.raises(UserError, match=f"cannot write {path}: "):
        write_json(path, {})
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.json"
    write_json(path, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file that may not grow fails as one on a full disk does: in the middle of a write.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match=f"cannot write {path}: .*; free space"):
            write_json(path, "x" * 1_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == '"old"\n'
    assert list(tmp_path.iterdir()) == [path]


def test_files_have_the_permissions_that_the_user_chose(tmp_path):
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "out.json", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out.json").stat().st_mode) == 0o640


def test_a_name_as_long_as_file_systems_allow_can_be_written(tmp_path):
    path = tmp_path / ("n" * 255)
    write_json(path, 1)
    assert path.read_text() == "1\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {"deep": [float("nan")]}])
def test_what_json_cannot_hold_is_not_written(tmp_path, value):
    with pytest.raises((ValueError, TypeError)):
        write_json(tmp_path / "out.json", value)
    assert list(tmp_path.iterdir()) == []


def test_the_hash_of_files_is_that_of_their_contents_one_after_another(tmp_path):
    contents = [b"", b"x" * (3 << 20), b"end"]
    paths = [tmp_path / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    assert sha256_of_files(*paths) == hashlib.sha256(b"".join(contents)).hexdigest()
    assert sha256_of_files(*reversed(paths)) != sha256_of_files(*paths)


@given(st.dictionaries(st.text(), st.floats(allow_nan=False) | st.text()))
def test_the_hash_of_json_does_not_depend_on_the_order_of_keys(body):
    backwards = dict(reversed(list(body.items())))
    assert sha256_of_json(backwards) == sha256_of_json(body)
    assert sha256_of_json({**body, "one": "more"}) != sha256_of_json({**body, "one": "less"})


@pytest.fixture
def folders(tmp_path):
    """A folder with a file, and the new one that is to take its place."""
    new, folder = tmp_path / ".[a] b.tmp", tmp_path / "[a] b"
    for path in (new, folder):
        path.mkdir()
        (path / "file").write_text(path.name)
    return new, folder


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def at_the_second_rename(monkeypatch, happens):
    real, steps = os.replace, iter(range(10))
    monkeypatch.setattr(os, "replace", lambda *a: happens() if next(steps) == 1 else real(*a))


def killed_at_the_second_rename(new, folder, monkeypatch):
    process = os.fork()
    if process == 0:
        at_the_second_rename(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
        replace_folder(new, folder)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    assert not folder.exists()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_is_replaced_as_a_whole(folders, is_there):
    new, folder = folders
    if not is_there:
        folder.rename(folder.with_name("elsewhere"))
    replace_folder(new, folder)
    assert (folder / "file").read_text() == new.name
    assert names_in(folder.parent) == ["[a] b"] + ["elsewhere"] * (not is_there)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_replacement_that_fails_between_its_steps_is_undone(folders, monkeypatch, error):
    def refuse():
        raise error

    new, folder = folders
    with monkeypatch.context() as patched:
        at_the_second_rename(patched, refuse)
        with pytest.raises(type(error)):
            replace_folder(new, folder)
    assert (folder / "file").read_text() == folder.name
    assert names_in(folder.parent) == [new.name, folder.name]


@pytest.mark.parametrize("by", [put_back, lambda folder: put_all_back(folder.parent)])
def test_a_replacement_that_is_killed_between_its_steps_is_undone_later(folders, monkeypatch, by):
    new, folder = folders
    killed_at_the_second_rename(new, folder, monkeypatch)
    by(folder)
    by(folder)  # as other ranks may do at the same time
    assert (folder / "file").read_text() == folder.name
    assert names_in(folder.parent) == [new.name, folder.name]


def test_what_was_replaced_and_not_deleted_is_deleted_and_never_put_back(folders, monkeypatch):
    new, folder = folders
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *_, **__: None)  # as killed before it
        replace_folder(new, folder)
    assert len(names_in(folder.parent)) == 2
    put_back(folder)
    assert (folder / "file").read_text() == new.name
    remove_replaced(folder)
    assert names_in(folder.parent) == [folder.name]


def test_what_is_the_only_copy_is_not_deleted(folders, monkeypatch):
    new, folder = folders
    killed_at_the_second_rename(new, folder, monkeypatch)
    remove_replaced(folder)
    put_back(folder)
    assert (folder / "file").read_text() == folder.name
