"""Read checkpoints that megatron-core's own model wrote, with Megatron-LM's arguments."""

from __future__ import annotations

import argparse
import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_chameleon.checkpoint.index import read_index
from megatron_chameleon.checkpoint.open_model import CheckpointModel, open_model
from megatron_chameleon.checkpoint.options import TokenizerChoice
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.config import RopeScaling
from tests.families import FAMILIES, llama, small
from tests.megatron_checkpoint import (
    ITERATION,
    SAMPLES,
    arguments,
    logits_of,
    megatron_model,
    save_megatron,
)
from tests.rounding import assert_as_near
from tests.small_corpus import VOCAB_SIZE, word_tokenizer
from tests.unit.checkpoint.samples import PickledCode

# Megatron-LM's own scalings are those of Llama 3.1, with its constants, and linear.
MODELS = {
    **FAMILIES,
    "gpt2, fused bias and GELU": small(activation="gelu_tanh"),
    "llama3 scaling": llama(
        rotary_base=500_000.0, rope_scaling=RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    ),
    "linear scaling, partial rotation": llama(
        rotary_percent=0.5, rope_scaling=RopeScaling("linear", 2.0)
    ),
    "GELU without biases": llama(activation="gelu", normalization="LayerNorm"),
}
LAYOUTS = {
    "stacked layers": None,
    "separate layers": {"non_homogeneous_layers": True},
    "separate halves": {"singleton_local_shards": True},
}


def opened(folder: Path, tokenizer: TokenizerChoice | None = None) -> CheckpointModel:
    model = open_model(folder, tokenizer=tokenizer)
    assert isinstance(model, CheckpointModel)
    return model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return word_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_the_logits_of_megatrons(one_rank, tokenizer, tmp_path, name):
    config = MODELS[name]
    args = arguments(config, tokenizer, padded_vocab_size=320)
    theirs = megatron_model(args, one_rank)
    folder = save_megatron(tmp_path, theirs, args)
    record = opened(folder).record
    found = CheckpointModel(record).config
    assert vars(found) == {**vars(config), "vocab_size": VOCAB_SIZE}
    assert (record.step, record.samples, record.root) == (ITERATION, SAMPLES, folder)
    ours = CheckpointModel(record).reader(one_rank).model
    names = [name for name, _ in ours.named_parameters()]
    assert names == [name for name, _ in theirs.named_parameters()]
    for name, weight in theirs.named_parameters():
        own = ours.get_parameter(name)
        rows = VOCAB_SIZE if "word_embeddings" in name or "output_layer" in name else len(own)
        assert torch.equal(own[:rows], weight[:rows]), name
    length = 100 if config.is_rotary else config.max_sequence_length
    reference = logits_of(theirs, length, VOCAB_SIZE)
    exact = logits_of(theirs.double(), length, VOCAB_SIZE)
    assert reference.std() > 0.1
    assert_as_near(logits_of(ours, length, VOCAB_SIZE), reference, exact)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_of_tensors_is_read(one_rank, tokenizer, tmp_path, layout):
    args = arguments(FAMILIES["llama"], tokenizer)
    theirs = megatron_model(args, one_rank).bfloat16()
    folder = save_megatron(tmp_path, theirs, args, metadata=LAYOUTS[layout])
    names = read_index(folder).state_dict_metadata
    # These are also the names of Transformer Engine's layers, which include the norms.
    prefix = "decoder.layers." if layout == "stacked layers" else "decoder.layers.3."
    assert f"{prefix}self_attention.linear_qkv.layer_norm_weight" in names
    ours = open_model(tmp_path).reader(one_rank).model
    for name, weight in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name)[:VOCAB_SIZE], weight[:VOCAB_SIZE].float()), name


REJECTED = {
    "glu_linear_offset": 1.0,
    "num_experts": 8,
    "multi_latent_attention": True,
    "squared_relu": True,
    "position_embedding_type": "yarn",
    "rotary_interleaved": True,
    "window_size": (128, 0),
    "apply_layernorm_1p": True,
    "mtp_num_layers": 1,
    "use_mup": True,
    "heterogeneous_layers_config_path": "layers.json",
    "num_layers": None,
    "normalization": torch.float32,
    "num_query_groups": 3,
    "kv_channels": 15,
}


@pytest.fixture
def saved(one_rank, tokenizer, tmp_path):
    """Folder of a checkpoint, and its arguments."""
    args = arguments(FAMILIES["llama"], tokenizer)
    return save_megatron(tmp_path, megatron_model(args, one_rank), args), args


def change_arguments(folder, args, **changes):
    common = {"args": argparse.Namespace(**{**vars(args), **changes}), "iteration": ITERATION}
    torch.save(common, folder / "common.pt")


def test_what_is_not_supported_is_rejected_by_the_name_of_its_argument(saved):
    folder, args = saved
    for name, value in REJECTED.items():
        change_arguments(folder, args, **{name: value})
        with pytest.raises(UserError, match=rf"^{folder}/common\.pt: [^\n]*{name}[^\n]*$"):
            open_model(folder)
    # A part of the model that the arguments do not show.
    change_arguments(folder, args, qk_layernorm=True)
    with pytest.raises(UserError, match=r"parameters"):
        open_model(folder)


def test_arguments_of_later_releases_have_other_names(saved):
    folder, args = saved
    vars(args).pop("norm_epsilon")
    change_arguments(folder, args, layernorm_epsilon=1e-6, layernorm_zero_centered_gamma=False)
    assert open_model(folder).config.layernorm_epsilon == 1e-6


def test_an_index_of_an_earlier_release_is_read(saved, one_rank):
    folder, _ = saved
    index = read_index(folder)
    vars(index.storage_meta)["checkpoint_id"] = folder
    vars(index)["mcore_data"] = {"embedding.word_embeddings.weight": {}}
    now = b"torch.distributed.checkpoint.metadata\nMetadata\n"
    before = b"megatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"
    content = pickle.dumps(index, protocol=2)
    assert now in content
    (folder / ".metadata").write_bytes(content.replace(now, before))
    open_model(folder).reader(one_rank)


@pytest.mark.parametrize("among_tensors", [False, True])
def test_common_state_is_read_where_each_release_keeps_it(
    one_rank, tokenizer, tmp_path, among_tensors
):
    trace = tmp_path / "ran"
    args = arguments(FAMILIES["qwen3"], tokenizer, rampup=PickledCode(trace))
    theirs = megatron_model(args, one_rank)
    folder = save_megatron(tmp_path / "a", theirs, args, common_among_tensors=among_tensors)
    assert (folder / "common.pt").exists() != among_tensors
    assert b"mkdir" in b"".join(path.read_bytes() for path in folder.iterdir())
    model = opened(folder)
    assert (model.step, model.record.samples) == (ITERATION, SAMPLES)
    assert vars(model.config) == {
        **vars(FAMILIES["qwen3"]),
        "vocab_size": VOCAB_SIZE,
    }
    assert not trace.exists()


def test_damaged_common_state_is_a_user_error(saved):
    folder, args = saved
    for content in (b"", b"no pickle", pickle.dumps({"args": args})):
        (folder / "common.pt").write_bytes(content)
        with pytest.raises(UserError, match=r"^[^\n]*common\.pt[^\n]*use another checkpoint$"):
            open_model(folder)


def test_a_damaged_place_of_the_common_state_is_a_user_error(one_rank, tokenizer, tmp_path):
    args = arguments(FAMILIES["llama"], tokenizer)
    theirs = megatron_model(args, one_rank)
    folder = save_megatron(tmp_path / "a", theirs, args, common_among_tensors=True)
    index = read_index(folder)
    places, key = index.storage_data, MetadataIndex("common_state/shard_0_1")
    place = places[key]
    (tmp_path / "outside").write_bytes((folder / place.relative_path).read_bytes())
    changes = (
        {"relative_path": "../outside"},
        {"offset": place.offset + 1},
        {"offset": 2**62},
        {"length": place.length - 1},
    )
    changed = [{**places, key: dataclasses.replace(place, **change)} for change in changes]
    others = {name: other for name, other in places.items() if name != key}
    for storage_data in (*changed, [1], {key: 3}, {key: None}, others):
        vars(index)["storage_data"] = storage_data
        (folder / ".metadata").write_bytes(pickle.dumps(index))
        where = r"common\.pt[^\n]*" if storage_data is others else ""
        with pytest.raises(UserError, match=rf"^[^\n]*{where}use another checkpoint$"):
            open_model(folder)


def test_a_checkpoint_of_a_newer_format_is_rejected_with_both_versions(saved):
    folder, args = saved
    torch.save({"args": args, "checkpoint_version": 4.0}, folder / "common.pt")
    with pytest.raises(UserError, match=r"checkpoint_version is 4\.0, but .* reads 3\.0"):
        open_model(folder)
    (folder / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 2}'
    )
    with pytest.raises(UserError, match=r"sharded_backend_version is 2, but .* reads 1"):
        open_model(folder)


def test_a_pickled_object_in_place_of_a_weight_is_not_read(saved, one_rank, tmp_path):
    """Entries of other names may be pickles, such as Megatron-LM's random states."""
    folder, _ = saved
    index = read_index(folder)
    entries = index.state_dict_metadata
    (name,) = (name for name in entries if name.startswith("rng_state/"))
    weight = "decoder.final_layernorm.weight"
    entries[weight] = dataclasses.replace(entries[name])
    vars(entries[weight])["size"] = torch.Size([64])
    (place,) = (place for place in index.storage_data if place.fqn == name)
    moved = dataclasses.replace(place, fqn=weight)
    index.storage_data[moved] = index.storage_data[place]
    record = opened(folder).record
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=rf"{weight} is not a tensor"):
        CheckpointModel(record).reader(one_rank)


def test_the_tokenizer_must_be_found_and_have_embeddings(saved, tokenizer, tmp_path):
    folder, args = saved
    expected = opened(folder).record
    for missing in ("meta-llama/Llama-3.1-8B", None):
        change_arguments(folder, args, tokenizer_model=missing)
        with pytest.raises(UserError, match=r"--tokenizer-model"):
            open_model(folder)
    record = opened(folder, tokenizer=TokenizerChoice(tokenizer_model=tokenizer)).record
    assert (record.tokenizer_hash, record.hash) == (expected.tokenizer_hash, expected.hash)
    large = tmp_path / "large.json"
    Tokenizer(WordLevel({str(n): n for n in range(257)}, unk_token="0")).save(str(large))
    # Only text with the last token is rejected.
    model = opened(folder, tokenizer=TokenizerChoice(tokenizer_model=large, eod_token="256"))
    assert model.config.vocab_size == 256
    with pytest.raises(UserError, match="256 embeddings, but the end-of-document token"):
        model.with_own_vocabulary()


def test_other_folders_of_megatron_are_rejected(saved, tmp_path):
    folder, _ = saved
    torch.save({"iteration": 3}, folder / "common.pt")
    with pytest.raises(UserError, match=r"args"):
        open_model(tmp_path)
    (folder / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}')
    with pytest.raises(UserError, match=r"format fsdp_dtensor"):
        open_model(tmp_path)
    (folder / "metadata.json").unlink()
    (folder / "mp_rank_00").mkdir()
    for path in (tmp_path, folder):
        with pytest.raises(UserError, match=r"format torch;"):
            open_model(path)
    for tracked in ("2000", "..", "release"):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracked)
        with pytest.raises(UserError, match=r"there is no checkpoint"):
            open_model(tmp_path)
    with pytest.raises(UserError, match=r"no such folder"):
        open_model(tmp_path / "nothing")
