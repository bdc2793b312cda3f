"""Small random Hugging Face models with a tokenizer of words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.small_corpus import EOD, VOCAB_SIZE

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    # With small weights, all hidden states would be nearly the embeddings.
    "initializer_range": 0.2,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), EOD),
}
GROUPED = {"num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "gpt_neox": {},
    "bert": {},
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2, "sep_token_id": EOD},
}
ENCODERS = ("bert", "modernbert")
DIGITS = ["?", *"9876543210"]
"""First tokens of the tokenizer that splits text into digits."""
CLS, SEP = 248, 249
"""Ids of the special tokens of encoders; they are words of the corpus, too."""


def write_model(folder: Path, family: str, **changes: Any) -> Path:
    """Write a random model of ``family`` without a tokenizer."""
    import torch
    import transformers

    if family == "modernbert":
        changes["cls_token_id"] = CLS
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **CONFIGS[family], **changes})
    torch.manual_seed(1)
    model = transformers.AutoModel.from_config(config)
    with torch.no_grad():  # biases and norms are random, too
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    if family not in ENCODERS:  # with an output layer, as in a folder of a causal model
        whole = transformers.AutoModelForCausalLM.from_config(config)
        getattr(whole, whole.base_model_prefix).load_state_dict(model.state_dict())
        model = whole
    model.save_pretrained(folder)
    return folder


def write_tokenizer(
    folder: Path, words: list[str], *, is_encoder: bool = False, splits_digits: bool = False
) -> None:
    """Write a tokenizer whose token i is ``words[i]``; words are separated by white space.

    Args:
        folder: folder of the model.
        words: the vocabulary, without the end-of-document token.
        is_encoder: put the tokens ``CLS`` and ``SEP`` around each text.
        splits_digits: make a word of each digit.
    """
    import transformers

    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    splits = [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits if splits_digits else splits[:1])
    if is_encoder:
        special = [(words[CLS], CLS), (words[SEP], SEP)]
        single = f"{words[CLS]} $A {words[SEP]}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=special
        )
    tokenizer.add_special_tokens(["<|endoftext|>"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=words[0], eos_token="<|endoftext|>"
    ).save_pretrained(folder)


def write_digits_tokenizer(folder: Path) -> None:
    """Write the tokenizer of an encoder that splits text into digits.

    A number has more tokens than in the corpus, and its tokens have other ids.
    """
    words = DIGITS + [f"unused{number}" for number in range(EOD - len(DIGITS))]
    write_tokenizer(folder, words, is_encoder=True, splits_digits=True)
