from __future__ import annotations

import pytest

from megatron_chameleon.corpus.folder import CorpusFolder
from megatron_chameleon.errors import UserError


def write_corpus(root, names, overwrite=False):
    with CorpusFolder(root, overwrite) as folder:
        for name in names:
            path = folder.partial / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(name)
        folder.publish()
        (root / "corpus.json").write_text("{}")


def fail(root, error, overwrite=False):
    with CorpusFolder(root, overwrite) as folder:
        (folder.partial / "tokenizer.json").write_text("t")
        raise error


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_files_appear_under_their_names_when_published(tmp_path):
    root = tmp_path / "deep" / "corpus"
    with CorpusFolder(root, overwrite=False) as folder:
        (folder.partial / "tokenizer.json").write_text("t")
        assert files(root) == [".partial/tokenizer.json"]
        folder.publish()
        assert files(root) == ["tokenizer.json"]
    assert files(root) == ["tokenizer.json"]


@pytest.mark.parametrize("error", [UserError, RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_of_a_run_that_fails(tmp_path, error):
    with pytest.raises(error):
        fail(tmp_path / "corpus", error)
    assert not (tmp_path / "corpus").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(error):
        fail(tmp_path / "mine", error)
    assert files(tmp_path) == ["mine/notes.txt"]


def test_a_corpus_is_replaced_only_when_asked(tmp_path):
    write_corpus(tmp_path, ["tokens/a-train.bin", "tokens/old-train.idx", "tokenizer.model"])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"already holds a corpus; .* --overwrite"):
        write_corpus(tmp_path, ["tokens/a-train.bin"])
    write_corpus(tmp_path, ["tokens/a-train.bin", "tokenizer.json"], overwrite=True)
    assert files(tmp_path) == ["corpus.json", "notes.txt", "tokenizer.json", "tokens/a-train.bin"]


def test_the_old_corpus_stays_if_its_replacement_fails(tmp_path):
    write_corpus(tmp_path, ["tokens/a-train.bin"])
    before = files(tmp_path)
    with pytest.raises(RuntimeError):
        fail(tmp_path, RuntimeError, overwrite=True)
    assert files(tmp_path) == before


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    (tmp_path / ".partial" / "tokens").mkdir(parents=True)
    (tmp_path / ".partial" / "tokens" / "a-train.bin").touch()
    write_corpus(tmp_path, ["tokens/b-train.bin"])
    assert files(tmp_path) == ["corpus.json", "tokens/b-train.bin"]


def test_two_runs_cannot_write_one_folder(tmp_path):
    with CorpusFolder(tmp_path, overwrite=False) as folder:
        (folder.partial / "tokenizer.json").write_text("t")
        with pytest.raises(UserError, match="another process is writing"):
            CorpusFolder(tmp_path, overwrite=False).__enter__()
        assert (folder.partial / "tokenizer.json").exists()
    write_corpus(tmp_path, ["tokenizer.json"])


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"):
        CorpusFolder(tmp_path / "file" / "corpus", overwrite=False).__enter__()
