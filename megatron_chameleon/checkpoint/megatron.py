"""Read Megatron-LM's torch_dist checkpoints: ``iter_*`` folders of weights and arguments.

The tensors of a model have the same names and shards as in a checkpoint of this package, because
both come from megatron-core. This module reads Megatron-LM's arguments, in the common state, and
makes the record that this package keeps in ``checkpoint.json``. No code in the files runs.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_chameleon.artifacts import CheckpointRecord, Corpus, provenance
from megatron_chameleon.artifacts.checkpoint import CONFIG_NAME, CheckpointFile
from megatron_chameleon.artifacts.files import read_foreign_json
from megatron_chameleon.artifacts.record import check_values
from megatron_chameleon.checkpoint.index import INDEX_NAME, read_index
from megatron_chameleon.checkpoint.options import TokenizerChoice
from megatron_chameleon.corpus.tokenizer import (
    TokenizerFile,
    corpus_tokenizer,
    read_tokenizer_file,
)
from megatron_chameleon.errors import UserError, first_line
from megatron_chameleon.model.config import Activation, ModelConfig, RopeScaling
from megatron_chameleon.model.initialization import OUTPUT_LAYER, WORD_EMBEDDINGS

TRACKER_NAME = "latest_checkpointed_iteration.txt"
_FORMAT, _FORMAT_VERSION = "torch_dist", 1
_LAYOUT_VERSION = 3.0  # of queries, keys and values inside a weight
_COMMON_STATE = "common_state/shard_0_1"  # the key and the number of megatron's ShardedObject
_MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HASHING_THREADS = 8  # hashing releases the GIL
_LAYOUT = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "sequence_parallel",
)


def find_megatron_folder(path: Path) -> Path | None:
    """Return the folder of the Megatron-LM checkpoint at ``path``; None if there is none.

    Args:
        path: a folder written for ``--save``, whose latest checkpoint is taken, or a folder of one
            iteration.

    Raises:
        UserError: if the latest checkpoint is missing, or has another format than torch_dist.
    """
    tracker, folder = path / TRACKER_NAME, path
    if tracker.is_file():
        latest = tracker.read_text(encoding="utf-8", errors="replace").strip()
        folder = path / (f"iter_{int(latest):07d}" if latest.isdecimal() else "release")
        if not folder.is_dir():
            raise UserError(f"{tracker}: there is no checkpoint {folder}; pass another checkpoint")
    else:
        is_ours = (path / CheckpointRecord.FILE_NAME).is_file()
        is_theirs = (path / CONFIG_NAME).is_file() or any(path.glob("mp_rank_*"))
        if is_ours or not is_theirs:
            return None
    config = folder / CONFIG_NAME
    body = read_foreign_json(config, "use another checkpoint") if config.is_file() else {}
    name = body.get("sharded_backend", "torch")
    if name != _FORMAT:
        raise UserError(
            f"{folder} has Megatron-LM's format {name}; convert it with Megatron-LM's "
            f"--ckpt-convert-format {_FORMAT} --ckpt-convert-save FOLDER"
        )
    _require_version(config, "sharded_backend_version", body, _FORMAT_VERSION)
    return folder


def _require_version(where: Path, name: str, values: dict[str, Any], known: float) -> None:
    """Raise UserError if ``values`` have another version of the format than the one that is read.

    Megatron-LM changes the version if it changes the meaning of what it writes.
    """
    version = values.get(name, known)
    if version != known:
        raise UserError(
            f"{where}: {name} is {version}, but this release reads {known}: use another release of "
            "megatron-chameleon, or save the checkpoint again with a Megatron-LM that writes "
            f"{known}"
        )


def megatron_record(folder: Path, tokenizer: TokenizerChoice) -> CheckpointRecord:
    """Return the record of the Megatron-LM checkpoint in ``folder``, after reading all its bytes.

    Args:
        folder: from :func:`find_megatron_folder`.
        tokenizer: location of the model's tokenizer; default: the checkpoint's ``tokenizer_model``.

    Raises:
        UserError: if a file is missing or damaged, the model is not supported, or its tokenizer is
            not found.
    """
    where, common = read_common_state(folder)
    if not isinstance(common.get("args"), dict):
        raise UserError(
            f"{where} holds no arguments (args), which Megatron-LM writes; use a checkpoint that "
            "Megatron-LM's training loop has written"
        )
    _require_version(where, "checkpoint_version", common, _LAYOUT_VERSION)
    saved = {**common["args"], "iteration": common.get("iteration", 0)}
    names = {field.name for field in dataclasses.fields(Arguments)}
    # Objects of other classes are no valid values, and become text here.
    body = json.loads(json.dumps({n: saved[n] for n in names & saved.keys()}, default=repr))
    hint = "this model is not supported, use another"
    arguments = check_values(str(where), Arguments, body, hint, "args")
    choice, file = _find_tokenizer(arguments, tokenizer, where)
    index = read_index(folder)
    rows = _rows(index, WORD_EMBEDDINGS)
    if not rows:
        raise UserError(f"{folder} has no embeddings; this model is not supported, use another")
    config = arguments.model_config(min(rows, file.open().vocab_size), where)
    _check_parameters(index, config, folder)
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        files = dict(zip(paths, pool.map(CheckpointFile.of, paths), strict=True))
    return CheckpointRecord(
        root=folder,
        model=dataclasses.asdict(config),
        step=arguments.iteration,
        samples=arguments.consumed_train_samples,
        domain_samples={},
        mixture_phases=[],
        domain_tokens={},
        tokenizer_hash=file.sha256,
        corpus_hash="",
        mixture_hash="",
        layout={name: getattr(arguments, name) for name in _LAYOUT},
        files={path.name: file for path, file in files.items()},
        provenance=provenance(choice, {}),
    )


def _find_tokenizer(
    arguments: Arguments, choice: TokenizerChoice, where: Path
) -> tuple[TokenizerChoice, TokenizerFile]:
    """Return the choice with the path of the tokenizer, and the tokenizer's file."""
    recorded = arguments.tokenizer_model or arguments.vocab_file
    path = choice.tokenizer_model or (Path(recorded) if recorded else None)
    if path is None or not path.exists():
        problem = f"is not at {path}" if path else "is not recorded"
        raise UserError(
            f"{where}: the tokenizer {problem}; pass it with --tokenizer-model, where the command "
            "has this flag, or to megatron-chameleon convert_checkpoint from-megatron, and use the "
            "result"
        )
    choice = TokenizerChoice(
        tokenizer_model=path,
        tiktoken_pattern=choice.tiktoken_pattern,
        eod_token=choice.eod_token,
    )
    if Corpus.exists(path):
        return choice, corpus_tokenizer(Corpus.load(path)).file
    return choice, read_tokenizer_file(path, choice.eod_token, choice.tiktoken_pattern)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of Megatron-LM that determine what the model computes, and those of its record.

    Defaults are Megatron-LM's, for arguments that earlier releases lack. Arguments that later
    releases have renamed are here under both names.
    """

    num_layers: PositiveInt
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt
    kv_channels: PositiveInt | None = None
    group_query_attention: bool = False
    num_query_groups: PositiveInt | None = None
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    use_rotary_position_embeddings: bool = False
    rotary_base: PositiveFloat = 10_000.0
    rotary_percent: PositiveFloat = 1.0
    rotary_seq_len_interpolation_factor: PositiveFloat | None = None
    use_rope_scaling: bool = False
    rope_scaling_factor: PositiveFloat = 8.0
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: PositiveFloat = 1e-5
    layernorm_epsilon: PositiveFloat | None = None
    swiglu: bool = False
    bias_gelu_fusion: bool = True
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    iteration: NonNegativeInt = 0
    consumed_train_samples: NonNegativeInt = 0
    world_size: PositiveInt = 1
    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False

    # Only these values are supported.
    num_experts: None = None
    multi_latent_attention: Literal[False] = False
    squared_relu: Literal[False] = False
    quick_geglu: Literal[False] = False
    apply_layernorm_1p: Literal[False] = False
    layernorm_zero_centered_gamma: Literal[False] = False
    apply_residual_connection_post_layernorm: Literal[False] = False
    qk_l2_norm: Literal[False] = False
    attention_output_gate: Literal[False] = False
    rotary_interleaved: Literal[False] = False
    no_rope_freq: None = None
    window_size: None = None
    softmax_type: Literal["vanilla"] = "vanilla"
    softmax_scale: None = None
    glu_linear_offset: Annotated[float, Field(ge=0, le=0)] = 0.0
    activation_func_clamp_value: None = None
    experimental_attention_variant: None = None
    mtp_num_layers: None = None
    is_hybrid_model: Literal[False] = False
    use_mup: Literal[False] = False
    heterogeneous_layers_config_path: None = None
    heterogeneous_layers_config_encoded_json: None = None
    spec: None = None

    def model_config(self, vocab_size: int, where: Path) -> ModelConfig:
        """Return the model with the vocabulary of its tokenizer.

        Raises:
            UserError: for arguments that contradict each other, or are not supported together.
        """
        is_rotary = self.position_embedding_type == "rope" or self.use_rotary_position_embeddings
        factor, scaling = self.rotary_seq_len_interpolation_factor, None
        if is_rotary and self.use_rope_scaling:
            # The other three numbers are constants of megatron-core, those of Llama 3.1.
            scaling = RopeScaling("llama3", self.rope_scaling_factor, 8192, 1.0, 4.0)
        elif is_rotary and factor is not None:
            scaling = RopeScaling("linear", factor)
        # megatron-core's fused bias and GELU uses the tanh approximation.
        is_fused = self.bias_gelu_fusion and self.add_bias_linear
        gelu: Activation = "gelu_tanh" if is_fused else "gelu"
        try:
            if self.use_rope_scaling and factor is not None:
                raise ValueError(
                    "rotary_seq_len_interpolation_factor is not supported with use_rope_scaling"
                )
            return ModelConfig(
                num_layers=self.num_layers,
                num_attention_heads=self.num_attention_heads,
                hidden_size=self.hidden_size,
                ffn_hidden_size=self.ffn_hidden_size,
                vocab_size=vocab_size,
                max_sequence_length=self.max_position_embeddings,
                num_query_groups=(self.group_query_attention and self.num_query_groups) or 0,
                kv_channels=self.kv_channels or 0,
                activation="swiglu" if self.swiglu else gelu,
                normalization=self.normalization,
                layernorm_epsilon=self.layernorm_epsilon or self.norm_epsilon,
                position_embedding_type="rope" if is_rotary else "learned_absolute",
                rotary_base=self.rotary_base,
                rotary_percent=self.rotary_percent,
                rope_scaling=scaling,
                qk_layernorm=self.qk_layernorm,
                add_bias_linear=self.add_bias_linear,
                add_qkv_bias=self.add_qkv_bias,
                untie_embeddings_and_output_weights=self.untie_embeddings_and_output_weights,
            )
        except ValueError as error:
            raise UserError(f"{where}: args: {error}; use another model") from error


def _rows(index: Metadata, name: str) -> int:
    """Return the number of rows of a tensor; 0 if there is no such tensor."""
    entry = index.state_dict_metadata.get(name)
    return entry.size[0] if isinstance(entry, TensorStorageMetadata) and entry.size else 0


def _check_parameters(index: Metadata, config: ModelConfig, folder: Path) -> None:
    """Check that the model's tensors are floating point, and as many as ``config`` has.

    A checkpoint with more parameters is a model with a part that its arguments here do not show.

    Raises:
        UserError: if they are not.
    """
    count = 0
    for name, entry in index.state_dict_metadata.items():
        if not name.startswith(_MODEL) or not isinstance(entry, TensorStorageMetadata):
            continue
        if entry.properties.dtype not in _FLOATS:
            raise UserError(
                f"{folder / INDEX_NAME}: tensor {name} is {entry.properties.dtype}: quantized "
                "weights are not supported; use another checkpoint"
            )
        count += entry.size.numel()
    matrices = (WORD_EMBEDDINGS, OUTPUT_LAYER)[: 1 + config.untie_embeddings_and_output_weights]
    padding = sum(max(0, _rows(index, name) - config.vocab_size) for name in matrices)
    expected = config.num_parameters + padding * config.hidden_size
    if count != expected:
        raise UserError(
            f"{folder / INDEX_NAME}: the model has {count:,} parameters, but its arguments "
            f"(args) describe a model of {expected:,}; this model is not supported, "
            "use another"
        )


class _Unread:
    """Stand-in for an object of a pickle that is not built; keeps the state of the object."""

    state: Any = None

    def __new__(cls, *_arguments: Any, **_keywords: Any) -> _Unread:
        return super().__new__(cls)

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"({type(self).__module__}.{type(self).__name__})"

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Ignore an item of a dictionary."""

    def append(self, _value: Any) -> None:
        """Ignore an item of a list."""

    def extend(self, _values: Any) -> None:
        """Ignore items of a list."""


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that imports nothing: each class or function is a new subclass of _Unread."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Unread,), {"__module__": module})

    def persistent_load(self, _identifier: Any) -> Any:
        """Leave tensors out."""
        return None


def read_common_state(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Read the plain values of the common state, with the fields of ``args`` as a dictionary.

    megatron-core keeps the common state in ``common.pt``, and from 0.19 on as an object among the
    tensors, which the index locates.

    Tensors, enums, dtypes and all other objects become inert stand-ins, so that a value of any
    class of Megatron-LM can be read without importing it.

    Returns:
        The file with the common state, and the state.

    Raises:
        UserError: if the file is missing or damaged.
    """
    path = folder / COMMON_STATE_FNAME
    index = None if path.exists() else read_index(folder)
    try:
        place = index and (index.storage_data or {}).get(MetadataIndex(_COMMON_STATE))
        if place:
            if place.relative_path not in os.listdir(folder):
                raise ValueError(f"{place.relative_path!r} is not in {folder}")
            path = folder / place.relative_path
        with path.open("rb") as stream:
            if place:
                stream.seek(place.offset)
                # The object is a list with the state of one rank.
                ((common,),) = _plain_values(io.BytesIO(stream.read(place.length)))
            else:
                (common,) = _plain_values(stream)
        if not isinstance(common, dict):
            raise pickle.UnpicklingError(f"it holds a {type(common).__name__}")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; use another checkpoint") from error
    except Exception as error:  # damaged bytes can raise any error
        raise UserError(
            f"cannot read the common state in {path} ({first_line(error)}): it is damaged; use "
            "another checkpoint"
        ) from error
    arguments = common.get("args")
    if isinstance(arguments, _Unread):  # an argparse.Namespace
        common["args"] = arguments.state
    return path, common


def _plain_values(stream: IO[bytes]) -> Iterator[Any]:
    """Read every pickle that torch.save has written to ``stream``: one, unless damaged."""
    with zipfile.ZipFile(stream) as archive:
        for name in archive.namelist():
            if name.endswith("/data.pkl"):
                with archive.open(name) as pickled:
                    yield _PlainUnpickler(pickled).load()
