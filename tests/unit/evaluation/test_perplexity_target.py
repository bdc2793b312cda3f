"""Test the loss of a target in evaluations."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megatron_chameleon.artifacts import EvaluationResult, MixtureWarning
from megatron_chameleon.corpus import target as target_module
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation import perplexity
from megatron_chameleon.evaluation.options import PerplexityOptions
from megatron_chameleon.evaluation.perplexity import evaluate_perplexities, result_table
from megatron_chameleon.training.options import TargetOptions, ValidationOptions
from megatron_chameleon.training.trainer import pretrain
from tests.small_corpus import with_text


@pytest.fixture(scope="module")
def trained(held_out_corpus, pretrain_options, tmp_path_factory):
    """A corpus, the test text of its held-out domain, and a run that records a target."""
    root = tmp_path_factory.mktemp("target")
    corpus, text = with_text(held_out_corpus, root / "corpus", "poems", "test")
    changes = {
        "corpus": corpus.root,
        "target": TargetOptions("news=3,code"),
        "validation": ValidationOptions(eval_interval=3),
    }
    pretrain(pretrain_options(root / "run", **changes))
    return corpus, text, root / "run"


@pytest.fixture
def evaluate(trained, tmp_path):
    """``evaluate(target, **changes)``: the result of one evaluation of the run."""
    corpus, _, run = trained

    def run_evaluation(target=None, **changes):
        options = PerplexityOptions(
            corpus=corpus.root, checkpoint=run, output=tmp_path / "result.json", target=target
        )
        return evaluate_perplexities([dataclasses.replace(options, **changes)])[0]

    return run_evaluation


def test_the_target_of_the_run_is_the_default(evaluate):
    result = evaluate()
    losses = {name: domain.loss for name, domain in result.domains.items()}
    errors = {name: domain.loss_error for name, domain in result.domains.items()}
    assert result.target.shares == {"news": 0.75, "code": 0.25}
    assert result.target.loss == pytest.approx(0.75 * losses["news"] + 0.25 * losses["code"])
    error = math.hypot(0.75 * errors["news"], 0.25 * errors["code"])
    assert result.target.error == pytest.approx(error)
    assert result.target.perplexity_error == pytest.approx(error * math.exp(result.target.loss))
    rows = [row.split()[0] for row in result_table(result).splitlines()]
    assert rows[1:6] == ["news", "code", "average", "target", "poems"]


@pytest.mark.parametrize("packing", ["packed", "documents"])
def test_a_text_has_the_loss_of_a_domain_with_the_same_text(evaluate, trained, packing):
    value = f"mine={trained[1]}=3,news"
    result = evaluate(value, target_text_key="words", packing=packing)
    assert [*result.domains] == ["news", "code", "poems", "mine"]
    assert result.held_out == ["poems", "mine"]
    poems, mine = result.domains["poems"], result.domains["mine"]
    assert mine.loss == pytest.approx(poems.loss, abs=1e-6)
    assert mine.clusters.tokens == poems.clusters.tokens
    assert mine.unigram_loss == pytest.approx(poems.unigram_loss)
    expected = 0.75 * poems.loss + 0.25 * result.domains["news"].loss
    assert result.target.loss == pytest.approx(expected, abs=1e-6)
    assert [*result.training_domains] == ["news", "code"]


def test_another_target_of_measured_domains_needs_no_evaluation(
    evaluate, trained, tmp_path, monkeypatch
):
    text = f"mine={trained[1]}"
    first = evaluate(text, target_text_key="words")
    monkeypatch.setattr(perplexity, "_evaluate", None)
    second = evaluate("news,poems=3")
    assert second.domains == first.domains
    assert second.target.shares == {"news": 0.25, "poems": 0.75}
    assert EvaluationResult.load(tmp_path / "result.json") == second
    assert evaluate(text, target_text_key="words").target == first.target
    other = trained[1].with_name("other.jsonl")
    other.write_text(trained[1].read_text())
    with pytest.raises(TypeError):
        evaluate(f"mine={other}", target_text_key="words")


def test_a_held_out_target_in_the_training_text_is_a_warning(evaluate, leaked_corpus, tmp_path):
    corpus, _ = with_text(leaked_corpus, tmp_path / "corpus", "poems", "test")
    with pytest.warns(MixtureWarning, match="20 of 20 documents of 'poems' .* of 'news'"):
        evaluate("poems", corpus=corpus.root)


def test_a_text_of_a_few_tokens_is_a_warning(evaluate, tmp_path):
    (tmp_path / "short.jsonl").write_text('{"text": "a few words"}\n')
    with pytest.warns(MixtureWarning, match="'mine' has .* mostly noise"):
        evaluate(f"mine={tmp_path}/short.jsonl")


def test_a_held_out_domain_of_a_few_tokens_is_a_warning(evaluate, monkeypatch):
    monkeypatch.setattr(target_module, "FEWEST_TARGET_TOKENS", 1_000_000)
    with pytest.warns(MixtureWarning, match="'poems' has .* mostly noise"):
        evaluate("poems")


@pytest.mark.parametrize("value", ["unknown", "news=0", "mine=missing.jsonl"])
def test_invalid_targets_are_errors(evaluate, value):
    with pytest.raises(UserError, match="--target"):
        evaluate(value)
