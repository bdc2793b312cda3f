from __future__ import annotations

import math
import os
import signal
import stat

import pytest

from megatron_chameleon.artifacts.files import (
    finish_replacements,
    read_foreign_json,
    replace_folder,
    replacing,
    write_json,
)
from megatron_chameleon.errors import UserError
from tests.full_disk import largest_file_size


def test_file_is_replaced_after_the_block(tmp_path):
    path = tmp_path / "deeper" / ("n" * 255)  # the longest name that most file systems allow
    before = os.umask(0o027)
    try:
        with replacing(path) as temporary:
            temporary.write_text("new")
            assert temporary.parent == path.parent  # renaming works only within a file system
            assert not path.exists()
    finally:
        os.umask(before)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_failing_block_changes_nothing(tmp_path):
    (tmp_path / "file").write_text("old")

    def write_half(path):
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    for name in ("file", "new"):
        with pytest.raises(KeyboardInterrupt):
            write_half(tmp_path / name)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.json"
    write_json(path, "old")
    # A file size limit fails like a full disk: in the middle of a write.
    with largest_file_size(100_000), pytest.raises(UserError, match=f"cannot write {path}: "):
        write_json(path, "x" * 1_000_000)
    assert path.read_text() == '"old"\n'
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def folders(tmp_path):
    """A folder with a file, and its replacement."""
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


def test_failed_replacement_of_a_folder_is_undone(folders, monkeypatch):
    def fail():
        raise KeyboardInterrupt

    new, folder = folders
    with monkeypatch.context() as patched:
        at_the_second_rename(patched, fail)
        with pytest.raises(KeyboardInterrupt):
            replace_folder(new, folder)
    assert (folder / "file").read_text() == folder.name
    assert names_in(folder.parent) == [new.name, folder.name]


def test_killed_replacement_of_a_folder_is_undone_later(folders, monkeypatch):
    new, folder = folders
    process = os.fork()
    if process == 0:
        at_the_second_rename(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
        replace_folder(new, folder)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    finish_replacements(folder.parent, "other")
    assert not folder.exists()
    for _ in range(2):
        finish_replacements(folder.parent)
        assert (folder / "file").read_text() == folder.name
        assert names_in(folder.parent) == [new.name, folder.name]


def test_replaced_folder_is_deleted_and_never_restored(folders, monkeypatch):
    new, folder = folders
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *_, **__: None)  # as if killed before the deletion
        replace_folder(new, folder)
    assert len(names_in(folder.parent)) == 2
    finish_replacements(folder.parent)
    assert (folder / "file").read_text() == new.name
    assert names_in(folder.parent) == [folder.name]


def test_files_of_other_libraries_are_read_as_python_reads_them(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1, "a": 2, "b": NaN, "c": -Infinity}')
    found = read_foreign_json(path, "hint")
    assert (found["a"], found["c"]) == (2, -math.inf)
    assert math.isnan(found["b"])
    path.write_text('{"a": %s}' % ("9" * 400))  # float() of this integer raises OverflowError
    with pytest.raises(UserError, match="digits"):
        read_foreign_json(path, "hint")
