"""Write a trained and evaluated run as a Hugging Face repository, and load it with transformers."""

from __future__ import annotations

import dataclasses
import json
import socket

import huggingface_hub
import pytest
import torch
import transformers

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    EvaluationResult,
    Mixture,
    MixturePhase,
    MixtureStage,
    TrainingRun,
    find_checkpoint,
)
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.options import PushOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import PerplexityOptions
from megatron_chameleon.evaluation.perplexity import evaluate_perplexities
from megatron_chameleon.push import push
from megatron_chameleon.report.model_card import load_card_content
from megatron_chameleon.training.trainer import pretrain
from tests.small_corpus import EOD, VOCAB_SIZE, word_tokenizer, write_small_corpus
from tests.unit.report.samples import PROVENANCE, ZERO_SHOT, downstream, edit, save

NAME = "manual-seed1"


@pytest.fixture(scope="module")
def root(pretrain_options, tmp_path_factory):
    """A run folder with a trained, evaluated base run; tests must not change it."""
    root = tmp_path_factory.mktemp("push")
    (root / "1-corpus").mkdir()
    tokenizer = sha256_of_files(word_tokenizer(root / "1-corpus/tokenizer.json"))
    corpus = write_small_corpus(root / "1-corpus", tokenizer_hash=tokenizer)
    mixture = Mixture(
        {"news": 0.5, "code": 0.3, "poems": 0.2},
        intervals={"code": (0.25, 0.36)},
        confidence=0.95,
        provenance=PROVENANCE,
    )
    file = root / "4-mixture/manual.json"
    mixture.save(file)
    run = root / "5-base" / NAME
    changes = {"corpus": corpus.root, "mixture": str(file), "train_iters": 3}
    pretrain(pretrain_options(run, **changes))
    output = root / f"6-evaluation/{NAME}.json"
    evaluate_perplexities([PerplexityOptions(corpus=corpus.root, checkpoint=run, output=output)])
    weights = CheckpointRecord.load(find_checkpoint(run)).hash
    answers = downstream({"arc_easy": {0: 0.4375}}, ZERO_SHOT, checkpoint_hash=weights)
    save(root, f"{NAME}-downstream", answers)
    save(root, "other", dataclasses.replace(answers, checkpoint_hash="0"))
    return root


def test_a_pushed_folder_loads_in_transformers_and_has_a_valid_card(root, tmp_path):
    output, run = tmp_path / "repository", TrainingRun.load(root / "5-base" / NAME)
    push(PushOptions(run=run.root, output=output, license="apache-2.0", language=("en", "code")))
    model = transformers.AutoModelForCausalLM.from_pretrained(output)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    assert tokenizer.eos_token_id == model.config.eos_token_id == EOD
    logits = model(torch.tensor([tokenizer("7")["input_ids"]])).logits
    assert logits.shape == (1, 1, VOCAB_SIZE)
    card = huggingface_hub.ModelCard.load(output / "README.md")
    assert card.data.to_dict() == {
        "language": ["en", "code"],
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["data-mixing", "megatron-chameleon"],
    }
    rows = [line.strip("| ").split(" | ") for line in card.text.splitlines() if line[:1] == "|"]
    result = EvaluationResult.load(root / f"6-evaluation/{NAME}.json")
    weights, losses = (row for row in rows if row[0] == "code")
    assert weights[1:3] == ["0.3000", "0.2500 to 0.3600"]
    assert losses[3].startswith(f"{result.domains['code'].perplexity:.2f} ± ")
    assert ["arc\\_easy", "43.8 ± 2.0"] in rows
    assert ["training tokens", f"{run.tokens:,}"] in rows
    assert Mixture.load(output / "mixture.json") == Mixture.load(root / "4-mixture/manual.json")
    assert TrainingRun.load(output) == dataclasses.replace(run, root=output, checkpoints=[])
    inputs = json.loads((output / "provenance.json").read_text())["inputs"]
    assert inputs == {"checkpoint": result.checkpoint_hash}


def test_a_changed_mixture_is_written_in_stages(root):
    run = TrainingRun.load(root / "5-base" / NAME)
    checkpoint = CheckpointRecord.load(find_checkpoint(run.root))
    phases = [
        MixturePhase(0, {"news": 1.0, "code": 3.0}),
        MixturePhase(16, {"news": 2.0, "code": 2.0}),
    ]
    content = load_card_content(
        dataclasses.replace(run, mixture_phases=phases), checkpoint, evaluations=()
    )
    assert content.mixture.weights == {"news": 0.25, "code": 0.75}
    assert content.mixture.stages == [MixtureStage(2, {"news": 0.5, "code": 0.5})]
    assert not content.perplexity


def test_a_push_that_cannot_succeed_writes_nothing(root, trained_run, tmp_path, monkeypatch):
    run, output = root / "5-base" / NAME, tmp_path / "repository"

    def error(**options):
        with pytest.raises(UserError) as found:
            push(PushOptions(**{"run": run, "output": output, **options}))
        assert not output.exists()
        assert not list(tmp_path.glob(".*"))
        return str(found.value)

    assert "--evaluations" in error(evaluations=(root / "6-evaluation/other.json",))
    assert "tokenizer" in error(run=trained_run)
    edit(trained_run / "run.json", status="interrupted", step=3)
    assert f"--run {trained_run} is not finished" in error(run=trained_run)
    with pytest.raises(UserError, match="choose a new folder"):
        push(PushOptions(run=run, output=trained_run))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    assert "hf auth login" in error(hub="someone/model")
    with socket.socket() as unused:  # bound, but not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        assert "--hub someone/model" in error(hub="someone/model")
    for options in ({"output": None}, {"private": True}, {"hub": "model"}):
        with pytest.raises(UserError, match="--hub"):
            PushOptions(**{"run": run, "output": output, **options})
