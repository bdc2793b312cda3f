"""Any model that transformers loads, as a proxy: hidden states, tokenizers and mistakes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from megatron_chameleon.artifacts import EmbeddingRecipe
from megatron_chameleon.corpus import encode
from megatron_chameleon.corpus.indexed import in_memory
from megatron_chameleon.corpus.tokenizer import LONGEST_PART
from megatron_chameleon.corpus.windows import Windows, draw_windows
from megatron_chameleon.embedding.embed import embed_windows
from megatron_chameleon.embedding.proxy import open_proxy
from megatron_chameleon.embedding.transformers_proxy import TransformersProxy
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.readout import DEFAULT_WINDOW_LIMIT
from megatron_chameleon.parallel.options import ParallelOptions
from tests.huggingface_models import CLS, ENCODERS, SEP, SMALL, write_model, write_tokenizer
from tests.unit.checkpoint.samples import change_config

LAYER, WINDOW = 2, 24
WEIGHTS, PARAMETER = "model.safetensors", "model.layers.1.mlp.up_proj.weight"
WORDS = [str(number) for number in range(250)]
RECIPE = EmbeddingRecipe("m" * 64, LAYER, WINDOW, 20, seed=0, tokenizer_hash="t" * 64)
LENGTHS = np.array([5, 60, 24, 1, 47], np.int32)
TOKENS = np.random.default_rng(0).integers(0, 240, LENGTHS.sum()).astype(np.uint16)


def write_folder(folder: Path, family: str, **changes) -> Path:
    write_model(folder, family, **changes)
    write_tokenizer(folder, WORDS, is_encoder=family in ENCODERS)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """``folders(family)``: the folder of a small random model, for reading only."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str) -> Path:
        path = root / family
        return path if path.exists() else write_folder(path, family)

    return folder


def opened(folder: Path) -> TransformersProxy:
    proxy = open_proxy(folder)
    assert isinstance(proxy, TransformersProxy)
    return proxy


def embed(reader, windows, batch_size, layer=LAYER):
    tokens = in_memory(Path("text"), TOKENS, LENGTHS)
    with tqdm(total=len(windows), disable=True) as progress:
        return embed_windows(reader, tokens, windows, layer, batch_size, progress, "text")


def embed_direct(folder, windows, layer, *, is_encoder=False, dtype=torch.float32):
    """Plain reference: the hidden states of the whole model, one window at a time."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype).eval()
    starts = np.cumsum(LENGTHS) - LENGTHS
    rows = []
    for document, start, length in zip(
        windows.document, windows.start, windows.length, strict=True
    ):
        first = starts[document] + start
        plain = TOKENS[first : first + length].tolist()
        ids = [CLS, *plain, SEP] if is_encoder else plain
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0]
        states = states[1:-1] if is_encoder else states
        rows.append(states.double().mean(0).numpy())
    return np.stack(rows)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "bert", "modernbert"])
def test_vector_is_the_mean_hidden_state_of_its_window(one_rank, folders, family):
    folder, is_encoder = folders(family), family in ENCODERS
    proxy = opened(folder)
    assert proxy.default_window_length == SMALL["max_position_embeddings"] - 2 * is_encoder
    assert (proxy.max_sequence_length == proxy.default_window_length) == (family == "bert")
    reader = proxy.open_reader(one_rank, RECIPE)
    windows = draw_windows(LENGTHS, WINDOW, 100, seed=0, name="a").longest_first()
    expected = embed_direct(folder, windows, LAYER, is_encoder=is_encoder)
    for batch_size in (1, 3, 100):
        found = embed(reader, windows, batch_size)
        np.testing.assert_allclose(found, expected, atol=2e-6)
    lists = [each for each in reader.model.modules() if isinstance(each, torch.nn.ModuleList)]
    assert [len(each) for each in lists] == [LAYER]  # later layers are not in memory


def test_layers_and_precision(one_rank, folders):
    folder = folders("llama")
    proxy = opened(folder)
    windows = draw_windows(LENGTHS, WINDOW, 100, seed=0, name="a").longest_first()
    last = EmbeddingRecipe("m", 4, WINDOW, 20, 0, "t")
    vectors = embed(proxy.open_reader(one_rank, last), windows, 4, layer=4)
    # transformers' last hidden states are those after the final norm; ours are not normalized.
    normalized = embed_direct(folder, windows, 4)
    assert np.abs(vectors - normalized).max() > 0.1
    half = EmbeddingRecipe("m", LAYER, WINDOW, 20, 0, "t", dtype="bfloat16")
    exact = embed_direct(folder, windows, LAYER)
    found = embed(proxy.open_reader(one_rank, half), windows, 4)
    reference = embed_direct(folder, windows, LAYER, dtype=torch.bfloat16)
    assert 1e-4 < np.abs(found - exact).max() < 3 * np.abs(reference - exact).max()


def test_flops_count_the_layers_that_run(folders):
    proxy = opened(folders("llama"))
    h, f, kv = SMALL["hidden_size"], SMALL["intermediate_size"], 16
    layer = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h  # the last term: two norms
    assert proxy.layer_parameters == (layer,) * 4
    assert proxy.embedding_paper_flops(10) == 2 * 10 * 4 * layer
    assert proxy.training_paper_flops == 0
    encoder = opened(folders("bert"))
    assert (proxy.is_causal, encoder.is_causal) == (True, False)


def test_default_window_length(folders, tmp_path):
    proxy = opened(folders("gpt2"))
    assert proxy.default_window_length == proxy.max_sequence_length == 64
    longer = write_folder(tmp_path / "long", "llama", max_position_embeddings=131_072)
    proxy = opened(longer)
    assert proxy.default_window_length == DEFAULT_WINDOW_LIMIT


def test_rotary_positions_allow_longer_windows(one_rank, tmp_path):
    def write(name, **rope):
        declared = {"max_position_embeddings": WINDOW // 2}
        return write_folder(tmp_path / name, "llama", **declared, **rope)

    proxy = opened(write("default"))
    assert (proxy.declared_length, proxy.default_window_length) == (WINDOW // 2, WINDOW // 2)
    with pytest.warns(UserWarning, match=f"--window-length {WINDOW}: .* at most {WINDOW // 2}"):
        proxy.check(RECIPE, ParallelOptions())
    windows = draw_windows(LENGTHS, WINDOW, 100, seed=0, name="a").longest_first()
    found = embed(proxy.open_reader(one_rank, RECIPE), windows, 3)
    np.testing.assert_allclose(found, embed_direct(proxy.where, windows, LAYER), atol=2e-6)
    # These frequencies depend on the longest window of a batch.
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    proxy = opened(write("dynamic", rope_parameters=dynamic))
    assert proxy.max_sequence_length == WINDOW // 2


def test_special_tokens_in_a_text_are_plain_text(folders):
    encoder = opened(folders("bert")).open_encoder()
    tokens, lengths = encoder.encode_documents(["7 9", "  ", "<|endoftext|> 8"])
    assert tokens[:2].tolist() == [7, 9]
    assert (lengths[:2].tolist(), int(tokens[-1])) == ([2, 1], 8)
    assert 250 not in tokens
    assert encoder.special_tokens == ((CLS,), (SEP,))


def test_hash_depends_on_weights_config_and_tokenizer(folders, tmp_path):
    found = opened(folders("llama")).hash
    same = write_folder(tmp_path / "same", "llama")
    assert opened(same).hash == found
    write_tokenizer(same, WORDS[::-1])
    assert opened(same).hash != found
    other = write_folder(tmp_path / "other", "llama", rms_norm_eps=1e-3)
    assert opened(other).hash != found


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of the weights; None deletes a tensor."""
    tensors = {**load_file(folder / WEIGHTS), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def truncate_weights(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 100)


def with_code(folder: Path, code: str = "raise SystemExit('this code must not run')") -> None:
    auto_map = {"AutoConfig": "model.Config", "AutoModel": "model.Model"}
    change_config(folder, auto_map=auto_map, model_type="its-own")
    (folder / "model.py").write_text(code)


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


FAULTS: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: change_config(f, num_hidden_layers=0), "0 layers"),
    (lambda f: change_config(f, num_hidden_layers=10**12), "1,000,000,000,000"),
    (lambda f: (f / WEIGHTS).unlink(), WEIGHTS),
    (pickle_weights, "pickle"),
    (truncate_weights, "download the model again"),
    (lambda f: change_tensors(f, **{PARAMETER: None}), "layers.1.mlp.up_proj.weight"),
    (
        lambda f: change_tensors(f, **{PARAMETER: torch.ones(48, 32, dtype=torch.int8)}),
        "layers.1.mlp.up_proj.weight is stored as I8",
    ),
    (
        lambda f: change_tensors(f, **{PARAMETER: torch.ones(48, 32, dtype=torch.float8_e4m3fn)}),
        "layers.1.mlp.up_proj.weight is stored as F8_E4M3",
    ),
    (
        lambda f: change_tensors(f, **{f"{PARAMETER}_scale_inv": torch.ones(1)}),
        f"{PARAMETER}_scale_inv",
    ),
    (with_code, "--trust-remote-code"),
    (without_tokenizer, "tokenizer"),
    (lambda f: transformers.T5Config(vocab_size=251).save_pretrained(f), "t5"),
]


@pytest.mark.parametrize(("damage", "named"), FAULTS, ids=[named for _, named in FAULTS])
def test_a_folder_that_cannot_be_a_proxy(one_rank, tmp_path, damage, named):
    folder = write_folder(tmp_path / "model", "llama")
    damage(folder)
    with pytest.raises(UserError, match=re.escape(named)) as error:
        open_proxy(folder).open_reader(one_rank, RECIPE)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_unused_tensors_are_named(one_rank, tmp_path):
    folder = write_folder(tmp_path / "model", "llama")
    unused = ("model.layers.9.mlp.up_proj.weight", "model.norm_of_nothing.weight")
    constant = "model.layers.0.self_attn.rotary_emb.inv_freq"
    names = (*unused, constant, "value_head.weight")
    change_tensors(folder, **{name: torch.ones(2) for name in names})
    with pytest.warns(UserWarning, match="2 tensor.*" + ", ".join(unused)):
        opened(folder).open_reader(one_rank, RECIPE)


def test_only_text_with_tokens_beyond_the_embeddings_is_rejected(one_rank, tmp_path):
    folder = write_folder(tmp_path / "model", "llama", vocab_size=251)
    write_tokenizer(folder, [*WORDS, "image", "audio"])
    reader = opened(folder).open_reader(one_rank, RECIPE)
    windows = Windows(np.arange(5), np.zeros(5, np.int64), LENGTHS.astype(np.int64))

    def embedded(tokens):
        text = in_memory(Path("text"), tokens, LENGTHS)
        with tqdm(total=5, disable=True) as progress:
            return embed_windows(reader, text, windows, LAYER, 2, progress, "text")

    assert np.isfinite(embedded(TOKENS)).all()
    tokens = TOKENS.copy()
    tokens[LENGTHS[:2].sum() + 3] = 251
    with pytest.raises(UserError, match="token id 251 in document 2 of domain 'text'"):
        embedded(tokens)


def test_code_runs_only_if_it_is_trusted(one_rank, tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "model", "llama")
    expected = open_proxy(folder).open_reader(one_rank, RECIPE)
    with_code(
        folder,
        "from transformers import LlamaConfig, LlamaModel\n\n\n"
        "class Config(LlamaConfig):\n    model_type = 'its-own'\n\n\n"
        "class Model(LlamaModel):\n    config_class = Config\n",
    )
    modules = "HF_MODULES_CACHE"
    monkeypatch.setattr(transformers.dynamic_module_utils, modules, str(tmp_path / "modules"))
    with pytest.raises(UserError, match="--trust-remote-code"):
        open_proxy(folder)
    reader = open_proxy(folder, trust_remote_code=True).open_reader(one_rank, RECIPE)
    windows = draw_windows(LENGTHS, WINDOW, 3, seed=0, name="a")
    np.testing.assert_array_equal(embed(reader, windows, 1), embed(expected, windows, 1))


def test_config_selects_neither_kernels_nor_other_weights(one_rank, folders, tmp_path):
    """transformers would load kernels from the hub, which are code, and weights not hashed here."""
    folder = write_folder(tmp_path / "model", "llama")
    kernels = "kernels-community/flash-attn2"
    change_config(folder, attn_implementation=kernels, transformers_weights="other.safetensors")
    readers = [
        open_proxy(each).open_reader(one_rank, RECIPE) for each in (folder, folders("llama"))
    ]
    windows = draw_windows(LENGTHS, WINDOW, 3, seed=0, name="a")
    np.testing.assert_array_equal(*(embed(reader, windows, 1) for reader in readers))


def test_hidden_states_of_another_shape_are_rejected(one_rank, tmp_path):
    """XLNet computes hidden states of shape [s, b, h]."""
    config = transformers.XLNetConfig(vocab_size=251, d_model=32, n_layer=4, n_head=4, d_inner=48)
    transformers.XLNetModel(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, WORDS)
    proxy = open_proxy(tmp_path)
    assert proxy.default_window_length == DEFAULT_WINDOW_LIMIT
    windows = draw_windows(LENGTHS, WINDOW, 3, seed=0, name="a")
    with pytest.raises(UserError, match="vector per token"):
        embed(proxy.open_reader(one_rank, RECIPE), windows, 2)


def test_long_and_many_texts_are_encoded_in_parts(folders, monkeypatch):
    encoder = open_proxy(folders("llama")).open_encoder()
    monkeypatch.setattr(encode, "_CHARACTERS_AT_ONCE", 8)
    repeats = 1 + LONGEST_PART // 4
    file = encode.encoded_documents(Path("text"), encoder, ["1 2 3", "7 9 " * repeats, "4 5", "6"])
    assert file.lengths.tolist() == [3, 2 * repeats, 2, 1]
    assert file.tokens[:3].tolist() + file.tokens[-3:].tolist() == [1, 2, 3, 4, 5, 6]
    assert file.tokens[3:-3].tolist() == [7, 9] * repeats


def test_unsupported_options(folders, monkeypatch):
    proxy = open_proxy(folders("llama"))
    with pytest.raises(UserError, match="--tensor-model-parallel-size"):
        proxy.check(RECIPE, ParallelOptions(tensor_model_parallel_size=2))
    normalized = EmbeddingRecipe("m", LAYER, WINDOW, 20, 0, "t", final_norm=True)
    with pytest.raises(UserError, match="--final-norm"):
        proxy.check(normalized, ParallelOptions())
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=re.escape("megatron-chameleon[hf]")):
        open_proxy(folders("llama"))
