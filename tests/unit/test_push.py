"""Write a trained and evaluated run as a Hugging Face repository, and load it with transformers."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import socket
import time
import types

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
from megatron_chameleon.push import Hub, push
from megatron_chameleon.report.model_card import load_card_content
from megatron_chameleon.training.trainer import pretrain
from tests.hub_server import TOKEN, Repository, hub_server
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
        max_repetition={"poems": 2.0},
        provenance=PROVENANCE,
    )
    file = root / "4-mixture/manual.json"
    mixture.save(file)
    run = root / "5-base" / NAME
    changes = {"corpus": corpus.root, "mixture": str(file), "train_iters": 3}
    changes["loss_weights"] = "code=2"
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
    assert "code=2" in card.text  # the loss weights
    assert Mixture.load(output / "mixture.json").weights == {"news": 0.5, "code": 0.3, "poems": 0.2}
    portable = dataclasses.replace(run, provenance=run.provenance.portable())
    assert TrainingRun.load(output) == dataclasses.replace(portable, root=output, checkpoints=[])
    for path in output.iterdir():
        assert str(root).encode() not in path.read_bytes(), path
        assert os.getcwd().encode() not in path.read_bytes(), path
    inputs = json.loads((output / "provenance.json").read_text())["inputs"]
    assert inputs == {"checkpoint": result.checkpoint_hash}


@pytest.mark.parametrize("is_of_file", [True, False])
def test_a_changed_mixture_is_written_in_stages(root, tmp_path, is_of_file):
    path, even = tmp_path / "staged.json", {"news": 0.5, "code": 0.5}
    mixture = Mixture(
        {"news": 0.25, "code": 0.75},
        stages=[MixtureStage(2, even), MixtureStage(9, {"news": 0.1, "code": 0.9})],
        max_repetition={"code": 4.0},
        scores={"news": 1.0, "code": 3.0},
    )
    mixture.save(path)
    run = TrainingRun.load(root / "5-base" / NAME)
    checkpoint = CheckpointRecord.load(find_checkpoint(run.root))
    phases = [
        MixturePhase(0, {"news": 1.0, "code": 3.0, "poems": 0.0}),
        MixturePhase(16 if is_of_file else 8, {"news": 2.0, "code": 2.0, "poems": 0.0}),
    ]
    options = {**run.provenance.options, "mixture": str(path)}
    content = load_card_content(
        dataclasses.replace(
            run,
            mixture_phases=phases,
            provenance=dataclasses.replace(run.provenance, options=options),
        ),
        dataclasses.replace(checkpoint, mixture_hash=mixture.hash),
        evaluations=(),
    )
    assert not content.perplexity
    if is_of_file:
        assert content.mixture == mixture
    else:
        assert content.mixture.stages == [MixtureStage(1, {**even, "poems": 0.0})]
        assert content.mixture.max_repetition == mixture.max_repetition
        assert content.mixture.scores is None


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose token is in the environment; failed requests are repeated without waiting."""
    store = tmp_path / "xet"
    store.mkdir()
    with hub_server(store) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        no_wait = types.SimpleNamespace(sleep=lambda _: None, time=time.time)
        monkeypatch.setattr(huggingface_hub.utils._http, "time", no_wait)
        yield hub


def files_in(folder):
    return {path.name: sha256_of_files(path) for path in folder.iterdir()}


@pytest.mark.parametrize("protocol", ["lfs", "xet"])
def test_the_hub_gets_every_file_and_loses_earlier_weights(
    root, hub, tmp_path, monkeypatch, capsys, protocol
):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", protocol == "lfs")
    options = {"run": root / "5-base" / NAME, "hub": "someone/model", "private": True}
    push(PushOptions(**options, output=tmp_path / "sharded", max_shard_size="400KB"))
    repository = hub.repositories["someone/model"]
    assert repository.private
    assert repository.files == files_in(tmp_path / "sharded")
    sharded = {path for path in repository.files if path.startswith("model")}
    assert len(sharded) > 3
    assert any(hub.xet_store.iterdir()) == (protocol == "xet")
    repository.files["notes.md"] = "0"  # written by the user
    push(PushOptions(**options, output=tmp_path / "single"))
    assert repository.files == {**files_in(tmp_path / "single"), "notes.md": "0"}
    _, changes = repository.commits
    assert set(changes["deletedFile"]) == sharded
    assert changes["lfsFile"] == ["model.safetensors"]
    assert f"uploaded to {hub.address}/someone/model/commit/2" in capsys.readouterr().out


def test_a_failed_upload_is_one_line_and_changes_no_repository(root, hub, tmp_path, monkeypatch):
    before = Repository(private=False, files={"model-00001-of-00002.safetensors": "0"})
    hub.repositories["someone/model"] = copy.deepcopy(before)
    folder = tmp_path / "small"
    folder.mkdir()
    for name in ("README.md", "model.safetensors"):
        (folder / name).write_bytes(bytes(100_000))

    def error(upload, request="", status=None):
        hub.objects.clear()
        hub.failures = {request: status} if request else {}
        with pytest.raises(UserError, match="--hub someone/") as found:
            upload()
        assert hub.repositories["someone/model"] == before
        assert "\n" not in str(found.value)
        return str(found.value)

    def upload(name="model", *, private=False):
        Hub(f"someone/{name}", private=private).upload(folder)

    assert "is public" in error(lambda: upload(private=True))
    assert "403" in error(lambda: upload("new"), "POST /api/repos/create", 403)
    assert "500" in error(upload, "GET .*/tree/main", 500)
    for status in (0, 403, 500):  # 0: the server ends the connection
        assert "model.safetensors" in error(upload, "PUT /lfs", status)
        assert "lfs" not in error(upload, "POST .*/commit/main", status)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    assert "403" in error(upload, "GET .*/xet-write-token", 403)
    output = tmp_path / "complete"
    options = PushOptions(run=root / "5-base" / NAME, hub="someone/model", output=output)
    assert "500" in error(lambda: push(options), "POST .*/commit/main", 500)
    assert transformers.AutoModelForCausalLM.from_pretrained(output)
    assert "Repo id" in error(lambda: Hub("someone/-model-", private=False))
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "Invalid user token" in error(lambda: Hub("someone/model", private=False))


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
