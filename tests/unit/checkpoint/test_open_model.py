"""Open every kind of model, and use it with the commands that read one."""

from __future__ import annotations

import pytest
import torch
import transformers

from megatron_chameleon.checkpoint.convert import convert_to_checkpoint, convert_to_huggingface
from megatron_chameleon.checkpoint.open_model import open_model
from megatron_chameleon.checkpoint.options import (
    FromHuggingFaceOptions,
    FromMegatronOptions,
    PushOptions,
    ToHuggingFaceOptions,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import PerplexityOptions
from megatron_chameleon.evaluation.perplexity import evaluate_perplexities
from megatron_chameleon.push import push
from tests.huggingface_models import write_model, write_tokenizer
from tests.small_corpus import EOD, VOCAB_SIZE

WORDS = [str(number) for number in range(EOD)]


def test_a_folder_and_its_conversion_have_the_same_perplexity(numbers_corpus, tmp_path):
    # The last embeddings are padding beyond the vocabulary of the tokenizer.
    folder = write_model(tmp_path / "gpt2", "gpt2", vocab_size=VOCAB_SIZE + 5)
    write_tokenizer(folder, WORDS)
    checkpoint = tmp_path / "checkpoint"
    convert_to_checkpoint(FromHuggingFaceOptions(model=folder, output=checkpoint))
    results = evaluate_perplexities(
        [
            PerplexityOptions(
                corpus=numbers_corpus.root,
                checkpoint=path,
                output=tmp_path / f"{path.name}.json",
                window_length=32,
                max_tokens=256,
            )
            for path in (folder, checkpoint)
        ]
    )
    assert results[0].domains == results[1].domains
    assert results[0].checkpoint_hash == open_model(folder).hash
    assert results[0].step == 0


def test_every_kind_of_model_is_converted_and_pushed(numbers_corpus, tmp_path):
    folder = write_model(tmp_path / "llama", "llama")
    write_tokenizer(folder, WORDS)
    first, second, half = (tmp_path / name for name in ("first", "second", "half"))
    convert_to_checkpoint(FromHuggingFaceOptions(model=folder, output=first))
    convert_to_checkpoint(FromMegatronOptions(checkpoint=first, output=second))
    models = [open_model(each) for each in (first, second)]
    assert models[0].hash == models[1].hash
    assert models[0].tokenizer().identity == models[1].tokenizer().identity
    convert_to_huggingface(ToHuggingFaceOptions(folder, half, dtype="bfloat16"))
    push(PushOptions(run=folder, output=tmp_path / "pushed"))
    tokens = torch.arange(20)[None]
    theirs = [
        transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)(tokens).logits
        for each in (folder, tmp_path / "pushed")
    ]
    torch.testing.assert_close(*theirs, rtol=0, atol=0)
    assert (tmp_path / "pushed" / "README.md").is_file()
    with pytest.raises(UserError, match="--evaluations"):
        push(PushOptions(run=folder, output=tmp_path / "other", evaluations=(first,)))


def test_a_family_that_only_transformers_runs_is_an_error_elsewhere(numbers_corpus, tmp_path):
    folder = write_model(tmp_path / "gpt_neox", "gpt_neox")
    write_tokenizer(folder, WORDS)
    model = open_model(folder)
    with pytest.raises(UserError, match=r"config\.json: field model_type 'gpt_neox'"):
        model.for_corpus(numbers_corpus)
