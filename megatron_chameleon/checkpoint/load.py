"""Load a checkpoint into a model or a training run, in any parallel layout."""

from __future__ import annotations

import contextlib
import pickle
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from megatron_chameleon.artifacts import CheckpointRecord, Corpus, find_checkpoint
from megatron_chameleon.artifacts.record import check_values, model_fields
from megatron_chameleon.checkpoint.huggingface import is_huggingface_folder
from megatron_chameleon.checkpoint.index import read_index
from megatron_chameleon.checkpoint.megatron import find_megatron_folder, megatron_record
from megatron_chameleon.checkpoint.optimizer_fixes import convert_loaded_state, prepare_for_loading
from megatron_chameleon.checkpoint.options import TokenizerChoice
from megatron_chameleon.checkpoint.state import (
    RANDOM,
    State,
    loadable_random_states,
    model_state,
    set_random_states,
    training_state,
)
from megatron_chameleon.corpus.tokenizer import Tokenizer, corpus_tokenizer, load_tokenizer
from megatron_chameleon.errors import UserError, first_line
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.parallel.layout import Layout


def open_checkpoint(
    path: Path, flag: str = "--checkpoint", tokenizer: TokenizerChoice | None = None
) -> CheckpointRecord:
    """Find the checkpoint at ``path``, and read all its bytes to verify or to hash them.

    Args:
        path: a run or a checkpoint of this package (see :func:`find_checkpoint`), or a checkpoint
            of Megatron-LM (see :func:`~megatron_chameleon.checkpoint.megatron.megatron_record`).
        flag: the option with this path, for messages.
        tokenizer: location of the tokenizer of Megatron-LM's checkpoint; default: the recorded one.

    Raises:
        UserError: if there is no such checkpoint, it is damaged, or its model is not supported.
    """
    folder = find_megatron_folder(path)
    if folder is not None:
        return megatron_record(folder, tokenizer or TokenizerChoice())
    if is_huggingface_folder(path):
        raise UserError(
            f"{flag} {path} is a Hugging Face folder; convert it with megatron-chameleon "
            "convert_checkpoint from-huggingface, and pass the result"
        )
    return CheckpointRecord.load(find_checkpoint(path, flag))


def config_of(record: CheckpointRecord) -> ModelConfig:
    """Return the model's config.

    Raises:
        UserError: if checkpoint.json has no valid config, or a config too large for the files.
    """
    where, hint = f"{record.root}/checkpoint.json", "the checkpoint is damaged; use another"
    config = check_values(where, ModelConfig, model_fields(record.model), hint, "model")
    held = sum(file.bytes for file in record.files.values())
    config.require_bytes(held, f"{where}: field model")
    return config


def require_tokenizer(record: CheckpointRecord, corpus: Corpus) -> None:
    """Raise UserError if the checkpoint and the corpus use different tokenizers."""
    if record.tokenizer_hash != corpus.tokenizer.sha256:
        raise UserError(
            f"{record.root} was trained with another tokenizer than that of {corpus.root}; "
            "preprocess the text again with the checkpoint's tokenizer (--tokenizer-model)"
        )


def find_tokenizer(options: TokenizerChoice, record: CheckpointRecord) -> Tokenizer:
    """Open the tokenizer of the checkpoint's training data.

    The tokenizer's location is taken from ``options``, or else from the options that the checkpoint
    records: those of a training run with --corpus or --data-path, or of a conversion.

    Raises:
        UserError: if the tokenizer cannot be found, or differs from that of the training data.
    """
    path = options.tokenizer_model or recorded_tokenizer(record)
    if path is None or not (options.tokenizer_model or path.exists()):
        problem = f"is no longer at {path}" if path else "is not recorded"
        raise UserError(
            f"the tokenizer of {record.root} {problem}; pass the tokenizer, or a corpus made "
            "with it, with --tokenizer-model"
        )
    if Corpus.exists(path):
        options.reject_changed(("tiktoken_pattern", "eod_token"), f"the corpus {path} records it")
        tokenizer = corpus_tokenizer(Corpus.load(path))
    else:
        recorded = record.provenance.options
        if not recorded.get("corpus"):  # a run with --data-path records its options under "data"
            recorded = recorded.get("data") or recorded
        eod_token = options.eod_token or recorded.get("eod_token")
        pattern = options.tiktoken_pattern or recorded.get("tiktoken_pattern")
        tokenizer = load_tokenizer(path, eod_token, pattern)
        if eod_token is None:
            warnings.warn(
                f"{record.root} does not record its end-of-document token: assuming "
                f"{tokenizer.eod_token}; pass --eod-token, or the corpus with --tokenizer-model",
                stacklevel=2,
            )
    if tokenizer.sha256 != record.tokenizer_hash:
        raise UserError(
            f"{tokenizer.path} is not the tokenizer that {record.root} was trained with (its hash "
            "differs); pass that tokenizer, or a corpus made with it, with --tokenizer-model"
        )
    return tokenizer


def recorded_tokenizer(record: CheckpointRecord) -> Path | None:
    """Return the recorded path of the tokenizer, or of the corpus or model folder that holds it.

    A relative path is resolved from the run's working directory, or if nothing is found there, from
    the current directory.
    """
    options = record.provenance.options
    data = options.get("data") or options
    place = options.get("corpus") or data.get("tokenizer_model") or options.get("model")
    if not place:
        return None
    from_start = Path(record.provenance.working_folder or ".") / place
    return Path(place) if Path(place).exists() and not from_start.exists() else from_start


def open_reader(record: CheckpointRecord, layout: Layout, *, bf16: bool = False) -> Reader:
    """Build this rank's model chunk in evaluation mode and load its weights.

    The model computes in float32 by default, regardless of the training dtype, so that embeddings
    and losses agree across layouts and devices; ``bf16`` is faster.
    """
    config = config_of(record)
    model = build_model(config, layout, seed=0, bf16=bf16)
    load_weights(record, [model])
    model.eval()
    return Reader(model=unwrap(model), config=config, layout=layout)


def load_weights(record: CheckpointRecord, model: Sequence[torch.nn.Module]) -> None:
    """Load the weights of ``record`` into ``model``, this rank's chunks. Collective.

    Raises:
        UserError: if a file is damaged, not listed in ``record``, or belongs to another model.
    """
    with _content_errors(record.root):
        index = read_index(record.root)
        wanted = model_state(model, names=index.state_dict_metadata)
        _load_model(model, _read(record, wanted, index))


def load_training(
    record: CheckpointRecord,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Load weights, optimizer, scheduler and random states, to resume a run exactly. Collective.

    Data-parallel ranks share the same state: each rank reads a part of it, and the ranks exchange
    the parts.

    Raises:
        UserError: if a file is damaged, not listed in ``record``, or belongs to another run.
    """
    prepare_for_loading(optimizer)
    wanted = training_state(model, optimizer, scheduler, is_loading=True)
    with _content_errors(record.root):
        index = read_index(record.root)
        wanted[RANDOM] = loadable_random_states(index)
        state = merge(_read_common_state(record.root), _read(record, wanted, index))
        _load_model(model, state)
        set_random_states(state.get(RANDOM, {}))
        convert_loaded_state(optimizer, state["optimizer"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])


def _read(record: CheckpointRecord, wanted: State, index: Metadata) -> State:
    """Read the entries of ``wanted`` in the checkpoint: tensors and plain values, no pickles.

    These are the steps of megatron's ``dist_checkpointing.load``, which also reads the common
    state. Releases differ in where they store it, and unpickle it without restriction.

    megatron's "_extra_state" entries are skipped. These entries are empty without Transformer
    Engine, and torch would unpickle any bytes stored in their place.
    """
    for place in index.storage_data.values():
        if place.relative_path not in record.files:
            raise ValueError(f"{place.relative_path!r} is not listed in {record.FILE_NAME}")
    for name, part in wanted.items():
        if name.startswith("model"):
            wanted[name] = {k: v for k, v in part.items() if not k.endswith("_extra_state")}
    shards, state, factories = load_preprocess(wanted)
    shards, _ = extract_sharded_base(shards)
    validate_sharding_integrity(determine_global_metadata(shards)[1])
    strategy = FullyParallelLoadStrategyWrapper(
        TorchDistLoadShardedStrategy(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    # megatron creates its readers with a module-level function, which cannot be passed as an
    # argument.
    before = torch_dist._get_filesystem_reader
    torch_dist._get_filesystem_reader = lambda *_arguments, **_more: _TensorReader(record, index)
    try:
        with warnings.catch_warnings():
            # Both are about how megatron calls torch.
            for message in ("The argument order of load has been", "torch.distributed is disabled"):
                warnings.filterwarnings("ignore", message)
            merge(state, strategy.load(shards, record.root))
    finally:
        torch_dist._get_filesystem_reader = before
    read: State = apply_factory_merges(state, factories)
    return read


def _load_model(model: Sequence[torch.nn.Module], state: State) -> None:
    for number, chunk in enumerate(model):
        # strict=False is needed only for megatron's "_extra_state" entries; _read fails on a
        # missing weight.
        missing, unexpected = unwrap(chunk).load_state_dict(state[f"model{number}"], strict=False)
        assert not [key for key in missing if not key.endswith("_extra_state")], missing
        assert not unexpected, unexpected


class _TensorReader(FileSystemReader):
    """torch's reader of files, restricted to tensors."""

    def __init__(self, record: CheckpointRecord, index: Metadata) -> None:
        super().__init__(record.root)
        self._index = index

    def read_metadata(self, *_arguments: Any, **_more: Any) -> Metadata:
        """Return the index that is already read; torch would unpickle it without restriction."""
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of ``plan``.

        Raises:
            UnpicklingError: if the index declares an item as pickled bytes, which torch would
                unpickle without restriction.
        """
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                raise pickle.UnpicklingError(f"{item.dest_index.fqn} is not a tensor")
        return super().read_data(plan, planner)


def _read_common_state(folder: Path) -> State:
    """Read ``common.pt``, restricted to tensors and plain values.

    Raises:
        UserError: if the file is damaged or holds anything but tensors and plain values.
    """
    path = folder / COMMON_STATE_FNAME
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(values, dict):
            raise pickle.UnpicklingError(f"it holds a {type(values).__name__}")
    except (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error
    return values


@contextlib.contextmanager
def _content_errors(folder: Path) -> Iterator[None]:
    """Convert torch's and megatron's errors for a bad checkpoint into a UserError."""
    try:
        yield
    # RuntimeErrors are raised by devices and by other ranks; the checkpoint does not cause them.
    except (UserError, RuntimeError, OSError, MemoryError):
        raise
    except CheckpointException as error:  # raised while reading a tensor
        cause = next((cause for cause, _ in error.failures.values()), error)
        # torch collects every error of the read, including an interrupt or a lack of memory.
        memory = isinstance(cause, MemoryError | torch.OutOfMemoryError)
        if memory or not isinstance(cause, Exception):
            raise cause from error
        raise _unreadable(folder, cause) from error
    except Exception as error:  # the state of another run can raise almost any error
        raise UserError(
            f"cannot load {folder} ({type(error).__name__}: {first_line(error)}): its state does "
            "not match this run; use another checkpoint"
        ) from error


def _unreadable(path: Path, error: BaseException) -> UserError:
    referenced = re.search(r"GLOBAL (\S+)", str(error))
    if referenced:
        reason = f"it references {referenced[1]}"
    elif "weights_only" in str(error):  # torch's message advises to disable this option
        reason = "it holds more than tensors and plain values"
    else:
        reason = first_line(error)
    return UserError(
        f"cannot read {path} ({reason}): it is damaged, or crafted to run code; use another "
        "checkpoint"
    )
