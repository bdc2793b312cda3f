"""A report is of one corpus: other evaluations are refused, and domains without text are shown."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from megatron_chameleon.artifacts import EvaluationResult, Mixture, TrainingRun
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.comparison import compare
from megatron_chameleon.report.loss_tables import bits_per_byte_table, loss_table
from megatron_chameleon.report.merged import merge
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.report_samples import (
    NAMES,
    perplexity_of,
    write_run_folder,
    write_sweep,
)

UNIFORM, CHAMELEON = RUNS = ("uniform-seed1", "chameleon-pretrain-seed1")


@pytest.fixture
def root(tmp_path):
    return write_run_folder(tmp_path / "run")


def edit_evaluation(root, name, **changes):
    path = root / "6-evaluation" / f"{name}.json"
    dataclasses.replace(EvaluationResult.load(path), **changes).save(path)


def trained_on(root, name, corpus_hash, data_path=None):
    run = TrainingRun.load(root / "5-base" / name)
    provenance = dataclasses.replace(
        run.provenance,
        inputs={"corpus": corpus_hash},
        options={"data": {"data_path": data_path}},
    )
    dataclasses.replace(run, provenance=provenance).save()


@pytest.mark.parametrize("names", [(UNIFORM,), (CHAMELEON,), RUNS])
def test_evaluations_on_another_corpus_than_the_folders_are_refused(root, names):
    for name in names:
        edit_evaluation(root, name, corpus_hash="other")
    with pytest.raises(UserError) as refused:
        compare(RunFolder.load(root))
    message = str(refused.value)
    assert any(str(root / "6-evaluation" / f"{name}.json") in message for name in names)
    assert f"another corpus than the one in {root / '1-corpus'}; evaluate with --corpus" in message


def test_evaluations_on_another_corpus_than_their_runs_are_refused(root):
    folder = RunFolder.load(root)
    assert folder.corpus is not None
    trained_on(root, UNIFORM, folder.corpus.hash)
    trained_on(root, CHAMELEON, "other")
    for has_corpus in (True, False):
        if not has_corpus:
            shutil.rmtree(root / "1-corpus")
        with pytest.raises(UserError) as refused:
            compare(RunFolder.load(root))
        assert str(root / f"6-evaluation/{CHAMELEON}.json") in str(refused.value)
        assert f"{root / '5-base' / CHAMELEON} was trained on" in str(refused.value)


@pytest.mark.parametrize("has_corpus", [True, False])
def test_runs_of_another_corpus_are_refused_though_not_evaluated(root, has_corpus):
    trained_on(root, CHAMELEON, "other")
    (root / f"6-evaluation/{CHAMELEON}.json").unlink()
    if not has_corpus:
        shutil.rmtree(root / "1-corpus")
    with pytest.raises(UserError, match="move it to a run folder of its corpus") as refused:
        compare(RunFolder.load(root))
    known = "1-corpus" if has_corpus else f"6-evaluation/{UNIFORM}.json"
    assert f"{root / '5-base' / CHAMELEON} was trained on another corpus" in str(refused.value)
    assert str(root / known) in str(refused.value)


@pytest.mark.parametrize("has_corpus", [True, False])
def test_a_sweep_of_another_corpus_is_refused(root, has_corpus):
    known = RunFolder.load(root).evaluations[UNIFORM].corpus_hash
    mixtures = {"ridge": [Mixture.load(root / "4-mixture/chameleon-pretrain.json")] * 2}
    provenance = RunFolder.load(root).mixtures["chameleon-pretrain"].provenance
    assert provenance is not None
    if not has_corpus:
        shutil.rmtree(root / "1-corpus")
    for inputs in ({}, {"corpus": known}, {"corpus": "other"}):
        made = dataclasses.replace(provenance, inputs=inputs)
        write_sweep(root, mixtures, provenance=made)
        if inputs != {"corpus": "other"}:
            compare(RunFolder.load(root))
    with pytest.raises(UserError, match="move the sweep to a run folder of its corpus") as refused:
        compare(RunFolder.load(root))
    assert str(root / "sweep.json") in str(refused.value)
    with pytest.raises(UserError, match="move the sweep"):
        merge([RunFolder.load(root), RunFolder.load(write_run_folder(root.parent / "second"))])


def test_a_sweep_by_itself_is_held_against_the_corpus_of_other_folders(root):
    mixture = RunFolder.load(root).mixtures["chameleon-pretrain"]
    assert mixture.provenance is not None
    alone = root.parent / "alone"
    mixture.save(alone / "4-mixture/chameleon-pretrain.json")
    for corpus_hash in (RunFolder.load(root).evaluations[UNIFORM].corpus_hash, "other"):
        made = dataclasses.replace(mixture.provenance, inputs={"corpus": corpus_hash})
        write_sweep(alone, {"ridge": [mixture] * 2}, provenance=made)
        folders = [RunFolder.load(root), RunFolder.load(alone)]
        if corpus_hash != "other":
            assert merge(folders).sweep is not None
    with pytest.raises(UserError, match=r"sweep\.json is of another corpus \(hash other\) than"):
        merge(folders)


def test_a_run_by_data_path_that_was_not_evaluated_is_let_be(root):
    trained_on(root, CHAMELEON, "hash of files", data_path=["a"])
    (root / f"6-evaluation/{CHAMELEON}.json").unlink()
    assert len(compare(RunFolder.load(root)).runs) == 1


def test_a_mixture_with_other_domains_is_refused_with_their_names(root):
    path = root / "4-mixture/foreign.json"
    Mixture.uniform([*NAMES, "v", "w", "x", "y", "z"]).save(path)
    with pytest.raises(UserError) as refused:
        compare(RunFolder.load(root))
    assert str(refused.value) == (
        f"{path} has weights for domains that the corpus in {root / '1-corpus'} does not have: "
        f"v, w, x and 2 more; compute it with --corpus {root / '1-corpus'}, or move the file to a "
        "run folder of its corpus"
    )


def test_a_mixture_of_some_of_the_domains_is_no_other_corpus(root):
    Mixture.uniform(NAMES[:2]).save(root / "4-mixture/part.json")
    assert len(compare(RunFolder.load(root)).runs) == 2


def test_runs_of_the_same_corpus_or_of_files_by_path_are_compared(root):
    folder = RunFolder.load(root)
    assert folder.corpus is not None
    trained_on(root, UNIFORM, folder.corpus.hash)
    trained_on(root, CHAMELEON, "hash of files", data_path=["0.5", "a", "0.5", "b"])
    assert len(compare(RunFolder.load(root)).runs) == 2


def test_a_domain_without_held_out_text_is_a_row_of_dashes(root):
    for name in RUNS:
        result = EvaluationResult.load(root / f"6-evaluation/{name}.json")
        domains = {n: dataclasses.replace(d, text_bytes=2000) for n, d in result.domains.items()}
        domains.pop("prose")
        edit_evaluation(root, name, domains=domains, left_out=["prose"])
    folder = RunFolder.load(root)
    comparison = compare(folder)
    bits = bits_per_byte_table(comparison)
    assert bits is not None
    tables = [perplexity_of(folder), loss_table(comparison), bits]
    for table in tables:
        assert [row[0].text for row in table.rows] == NAMES
        assert len({len(row) for row in (table.header, *table.rows, *table.summary)}) == 1
    weight, interval, *others = (cell.text for cell in tables[0].rows[-1][1:])
    assert float(weight) == pytest.approx(folder.base_runs[CHAMELEON].mixture["prose"], abs=5e-5)
    assert " to " in interval
    assert set(others) == {"-"}
    assert {cell.text for cell in tables[1].rows[-1][1:]} == {"-"}
    assert {cell.text for cell in tables[2].rows[-1][1:]} == {"-"}
    assert "Nothing to predict, and not in the average: prose." in tables[0].notes
    # The average is that of the others.
    first = comparison.runs[0].result
    assert tables[0].summary[0][-2].text == f"{first.mean_perplexity:.2f}"
    assert tables[0].summary[1][-1].text.endswith("of 2")
