"""Any causal or encoder model that transformers loads, as a proxy. transformers is optional.

The layers above the one that is read are deleted, and the model's forward pass ends after that
layer, so its final norm and output layer do not run. Each window gets the special tokens that the
model's tokenizer adds to a text, such as [CLS] and [SEP] of BERT or the beginning-of-sequence token
of Llama 3; the mean over the window leaves them out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus, EmbeddingRecipe
from megatron_chameleon.artifacts.files import read_foreign_json, sha256_of_files, sha256_of_json
from megatron_chameleon.checkpoint.huggingface import CODE, stored_types
from megatron_chameleon.checkpoint.open_model import HuggingFaceModel
from megatron_chameleon.checkpoint.options import TokenizerChoice
from megatron_chameleon.corpus.indexed import token_type
from megatron_chameleon.corpus.tokenizer import (
    LONGEST_PART,
    parts,
)
from megatron_chameleon.embedding.proxy import Proxy
from megatron_chameleon.errors import UserError, first_line
from megatron_chameleon.model.huggingface_config import CONFIG_NAME
from megatron_chameleon.model.huggingface_tensors import CONSTANT, UNQUANTIZED
from megatron_chameleon.model.readout import DEFAULT_WINDOW_LIMIT
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.parallel.options import ParallelOptions

# Window length of a model without a maximum: the most tokens of a sequence in an .idx.
_UNLIMITED = 2**31 - 1
# Names of tensors that scale quantized weights or activations.
_SCALE = re.compile(r"(.*[._])?(scales?|scale_inv|q?zeros|zero_points?|absmax|quant_map|SCB|g_idx)")
# Fields of config.json with the number of layers.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Files that configure the model and its tokenizer.
_CONFIGURES = (CONFIG_NAME, "*token*.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken")


@dataclasses.dataclass(frozen=True)
class TransformersProxy(Proxy):
    """A Hugging Face model, run by transformers.

    Attributes:
        trust_remote_code: whether Python code in the folder may run.
        declared_length: maximum tokens per window of the model's training, as its config.json
            declares them, without special tokens.
        layer_parameters: parameters of each layer.
        score_width: features of all heads together, for the FLOPs of attention scores.
        is_causal: whether attention is causal, for the FLOPs of attention scores.
        special_tokens: ids before and after each window.
    """

    trust_remote_code: bool
    declared_length: int
    layer_parameters: tuple[int, ...]
    score_width: int
    is_causal: bool
    special_tokens: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def find(cls, found: HuggingFaceModel, *, trust_remote_code: bool = False) -> TransformersProxy:
        """Check the model, without reading its weights.

        Raises:
            UserError: if transformers is not installed or cannot load the model or its tokenizer,
                or for a model that is neither causal nor an encoder of text.
        """
        folder = found.where
        types = stored_types(found.files)
        _reject_excess_layers(folder, len(types))
        config = _read_config(folder, trust_remote_code=trust_remote_code)
        # transformers scales the weights if the config describes how they are quantized.
        if getattr(config, "quantization_config", None) is None:
            _reject_quantized(folder, types)
        if config.is_encoder_decoder or config.get_text_config() is not config:
            raise UserError(
                f"{folder} ({config.model_type}): an encoder-decoder or multimodal model cannot "
                "be a proxy; pass a causal model or an encoder of text"
            )
        encoder = HuggingFaceEncoder(folder, trust_remote_code=trust_remote_code)
        # Unusual models lack some of the attributes that are read here.
        with _loading(folder) as transformers, torch.device("meta"):
            model = transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)
            layers, rows = find_layers(model, folder), model.get_input_embeddings().num_embeddings
            special = sum(map(len, encoder.special_tokens))
            declared = _declared_positions(model) - special
            longest = _UNLIMITED - special if allows_any_length(model) else declared
            heads = getattr(config, "num_attention_heads", 0)
            head_size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
            parameters = tuple(sum(map(torch.numel, each.parameters())) for each in layers)
            proxy = cls(
                model=found,
                hash=_hash(folder, found.files, with_code=trust_remote_code),
                num_layers=len(layers),
                hidden_size=config.hidden_size,
                max_sequence_length=longest,
                default_window_length=min(declared, DEFAULT_WINDOW_LIMIT),
                paper_parameters=sum(parameters),
                trust_remote_code=trust_remote_code,
                declared_length=declared,
                layer_parameters=parameters,
                score_width=heads * head_size,
                is_causal=any(getattr(module, "is_causal", False) for module in model.modules()),
                special_tokens=encoder.special_tokens,
            )
        # Other tokens without an embedding are rejected where they occur in text.
        if (largest := max(sum(encoder.special_tokens, ()), default=-1)) >= rows:
            raise UserError(
                f"{folder}: the tokenizer adds token {largest} to every text, but the model has "
                f"only {rows} embeddings; save the model's own tokenizer in the folder"
            )
        return proxy

    @property
    def where(self) -> Path:
        """The folder."""
        return self.model.where

    def check(self, recipe: EmbeddingRecipe, parallel: ParallelOptions) -> None:
        """Check the recipe and the layout.

        Warns if windows are longer than the model declares, which rotary positions allow.

        Raises:
            UserError: for tensor or pipeline parallelism, and for the final norm.
        """
        sizes = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size)
        if max(sizes) > 1:
            raise UserError(
                f"{self.where}: a Hugging Face model is not sharded over ranks; leave out "
                "--tensor-model-parallel-size and --pipeline-model-parallel-size, and every rank "
                "embeds its share of the windows"
            )
        if recipe.final_norm:
            raise UserError(
                f"--final-norm: not available for a Hugging Face model ({self.where}); leave it out"
            )
        if recipe.window_length > self.declared_length:
            warnings.warn(
                f"--window-length {recipe.window_length}: {self.where} declares at most "
                f"{self.declared_length:,} tokens; vectors of longer windows may be worse",
                stacklevel=2,
            )

    def reads_ids_of(self, corpus: Corpus) -> bool:
        """Return whether every token of ``corpus`` has the same id here; text can be encoded."""
        path = corpus.root / corpus.tokenizer.file
        return bool(self.model.has_ids_of(corpus.tokenizer, path))

    def open_encoder(self) -> HuggingFaceEncoder:
        """Open the folder's tokenizer."""
        names = [field.name for field in dataclasses.fields(TokenizerChoice)]
        self.model.choice.reject_changed(names, f"{self.where} has its own tokenizer")
        return HuggingFaceEncoder(self.where, trust_remote_code=self.trust_remote_code)

    def open_reader(self, layout: Layout, recipe: EmbeddingRecipe) -> TransformersReader:
        """Load the first layers on every rank."""
        config = _read_config(self.where, trust_remote_code=self.trust_remote_code)
        with _loading(self.where) as transformers:
            model, report = transformers.AutoModel.from_pretrained(
                self.where,
                config=config,
                dtype=getattr(torch, recipe.dtype),
                trust_remote_code=self.trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        # A model whose checkpoint has no pooler gets a random one, which does not run.
        missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
        if missing:
            raise UserError(
                f"{self.where}: its weights lack {len(missing)} tensors of its config, such as "
                f"{missing[0]}; download the model again"
            )
        unused = _unused_tensors(model, report["unexpected_keys"], self.where)
        if unused and layout.is_main:
            warnings.warn(
                f"{self.where}: {len(unused)} tensor(s) of its weights are not used, such as "
                f"{', '.join(unused[:3])}: the model of its config.json does not have them",
                stacklevel=2,
            )
        layers = find_layers(model, self.where)
        del layers[recipe.layer :]
        layers[-1].register_forward_hook(_end_forward_pass)
        model.config.use_cache = False
        model.eval().requires_grad_(False).to(layout.device)
        return TransformersReader(self, model, recipe.layer, layout)


class _LastLayerDone(Exception):  # noqa: N818
    """Ends a forward pass after the layer whose hidden states are read.

    Attributes:
        hidden_states: [b, s, h].
    """

    def __init__(self, hidden_states: torch.Tensor) -> None:
        self.hidden_states = hidden_states


def _end_forward_pass(
    _layer: torch.nn.Module, _inputs: object, output: torch.Tensor | Sequence[torch.Tensor]
) -> None:
    raise _LastLayerDone(output if isinstance(output, torch.Tensor) else output[0])


@dataclasses.dataclass(frozen=True)
class TransformersReader:
    """The first layers of a transformers model. Every rank holds all of them.

    Attributes:
        proxy: the proxy that was loaded.
        model: the model.
        layer: number of its layers.
        layout: layout of this rank.
    """

    proxy: TransformersProxy
    model: torch.nn.Module
    layer: int
    layout: Layout

    @property
    def hidden_size(self) -> int:
        """Features of a hidden state."""
        return self.proxy.hidden_size

    @property
    def max_sequence_length(self) -> int:
        """Maximum tokens per window, without special tokens."""
        return self.proxy.max_sequence_length

    @property
    def num_embeddings(self) -> int:
        """Number of token ids that the model has an embedding for."""
        return int(self.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]

    @torch.no_grad()
    def hidden_states(
        self, tokens: torch.Tensor, layer: int, lengths: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute [s, b, h] hidden states after ``layer`` layers, without special tokens.

        The arguments are those of :class:`~megatron_chameleon.embedding.proxy.ProxyReader`;
        ``layer`` is the layer that was loaded last.
        """
        assert layer == self.layer, f"the model was loaded to read layer {self.layer}"
        before, after = self.proxy.special_tokens
        batch, width = tokens.shape
        if lengths is None:
            lengths = torch.full((batch,), width, device=tokens.device)
        # [CLS] text [SEP] padding
        ends = lengths[:, None] + len(before)
        place = torch.arange(width + len(before) + len(after), device=tokens.device)
        ids = torch.nn.functional.pad(tokens, (len(before), len(after)))
        for position, token in enumerate(before):
            ids[:, position] = token
        for offset, token in enumerate(after):
            ids = torch.where(place == ends + offset, token, ids)
        mask = (place < ends + len(after)).to(torch.int64)
        try:
            self.model(input_ids=ids, attention_mask=mask)
        except _LastLayerDone as done:
            states = done.hidden_states
        if states.dim() != 3 or len(states) != batch or states.size(1) < ids.size(1):
            raise UserError(
                f"{self.proxy.where}: layer {layer} returns a tensor of shape "
                f"{list(states.shape)} for {list(ids.shape)} tokens, not a vector per token; pass "
                "another model"
            )
        return states.transpose(0, 1)[len(before) : len(before) + width]

    def final_norm(self) -> tuple[torch.Tensor, float]:
        """Never called, since ``TransformersProxy.check`` rejects --final-norm."""
        raise AssertionError("--final-norm is not available for transformers models")

    def sum_over_ranks(self, values: torch.Tensor, *, has_result: bool) -> torch.Tensor:
        """Sum ``values`` over the ranks with a result, on every rank. Collective."""
        if not has_result:
            values = torch.zeros_like(values)
        dist.all_reduce(values)
        return values

    def embedding_flops(self, layer: int, tokens: int, seq_length: int) -> float:
        """Count 2 FLOPs per parameter of the layers and token, and those of attention scores."""
        scores = 4 * seq_length * self.proxy.score_width / (2 if self.proxy.is_causal else 1)
        return tokens * (2.0 * sum(self.proxy.layer_parameters[:layer]) + layer * scores)


def _read_config(folder: Path, *, trust_remote_code: bool) -> Any:
    """Read the config.json in ``folder``, without the fields that select how weights are loaded.

    These fields name a file of weights, which would not be hashed, and attention or expert kernels,
    which are code from the Hugging Face hub.

    Raises:
        UserError: if transformers is not installed, or does not know the model.
    """
    with _loading(folder) as transformers:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        for field in ("transformers_weights", "_attn_implementation", "_experts_implementation"):
            setattr(config, field, None)
        return config


def _reject_excess_layers(folder: Path, tensors: int) -> None:
    """Check that weights of ``tensors`` tensors can have the layers of config.json.

    transformers would construct any number of layers, and take hours or all memory for it.

    Raises:
        UserError: if there are more layers than tensors, or config.json cannot be read.
    """
    path = folder / CONFIG_NAME
    body = read_foreign_json(path, "download the model again")
    for field in _LAYERS:
        if isinstance(layers := body.get(field), int) and layers > tensors:
            raise UserError(
                f"{path}: {field} is {layers:,}, but the weights have only {tensors:,} tensors; "
                "download the model again"
            )


def _reject_quantized(folder: Path, types: dict[str, str]) -> None:
    """Check that the weights are stored in floating-point types of 16 bits or more.

    Args:
        folder: the model, for messages.
        types: from :func:`stored_types`.

    Raises:
        UserError: if they are not.
    """
    for name, kind in types.items():
        if kind not in UNQUANTIZED and "weight" in name.rpartition(".")[2]:
            raise UserError(
                f"{folder}: tensor {name} is stored as {kind}, and its config.json does not "
                "describe how to scale it (quantization_config); use an unquantized copy"
            )


def _unused_tensors(model: torch.nn.Module, unexpected: Iterable[str], where: Path) -> list[str]:
    """List the tensors that transformers did not load, without those of the output layer.

    Args:
        model: the model without its output layer, whose tensors may have a prefix in the files.
        unexpected: names that transformers reports.
        where: folder of the model, for messages.

    Raises:
        UserError: if some of them scale the weights.
    """
    prefix, children = f"{model.base_model_prefix}.", {name for name, _ in model.named_children()}
    unused = [
        name
        for name in sorted(unexpected)
        if (name.startswith(prefix) or name.partition(".")[0] in children)
        and not CONSTANT.fullmatch(name)
    ]
    if scales := [name for name in unused if _SCALE.fullmatch(name)]:
        raise UserError(
            f"{where}: its weights are quantized with {len(scales)} scales, such as {scales[0]}, "
            "which its config.json does not describe (quantization_config); use an unquantized copy"
        )
    return unused


def find_layers(model: torch.nn.Module, where: Path) -> torch.nn.ModuleList:
    """Find the list of the model's layers: the outermost list of config.num_hidden_layers modules.

    Raises:
        UserError: if there is no such list.
    """
    count = int(model.config.num_hidden_layers)  # type: ignore[union-attr,arg-type]
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count > 0:
            return module
    raise UserError(
        f"{where}: {type(model).__name__} has no list of its {count} layers, so the hidden states "
        "of a layer cannot be read; pass another model"
    )


def _hash(folder: Path, weights: Iterable[Path], *, with_code: bool) -> str:
    """Hash the files that determine hidden states."""
    patterns = (*_CONFIGURES, *([CODE] if with_code else []))
    return sha256_of_files(
        *sorted({*weights, *(path for pattern in patterns for path in folder.glob(pattern))})
    )


def _declared_positions(model: torch.nn.Module) -> int:
    """Return the declared maximum number of tokens of a sequence, special tokens included."""
    declared = getattr(model.config, "max_position_embeddings", None)
    # XLNet declares -1.
    limits = [declared if declared and declared > 0 else _UNLIMITED]
    for name, module in model.named_modules():
        # RoBERTa's positions begin after the padding's.
        if isinstance(module, torch.nn.Embedding) and "position" in name and module.padding_idx:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return min(limits)


def allows_any_length(model: torch.nn.Module) -> bool:
    """Return whether a model computes hidden states of sequences of any length.

    These are models with rotary positions, which transformers computes from the position numbers.
    Frequencies that depend on the longest sequence of a batch (dynamic, longrope) are excluded: a
    vector must not depend on the other windows of its batch.
    """
    is_rotary = False
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and "position" in name:
            return False
        if any(key.endswith("inv_freq") for key, _ in module.named_buffers(recurse=False)):
            kinds = getattr(module, "rope_type", None)
            kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
            if not {"dynamic", "longrope"}.isdisjoint(kinds):
                return False
            is_rotary = True
    return is_rotary


class HuggingFaceEncoder:
    """The tokenizer of a Hugging Face folder.

    Args:
        folder: folder of the model.
        trust_remote_code: allow Python code in the folder to run.

    Raises:
        UserError: if transformers is not installed or cannot load the tokenizer.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        with _loading(folder, "the tokenizer") as transformers:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        model: Any = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "model", None)
        if getattr(model, "dropout", None) is not None:
            model.dropout = None  # it makes tokens random

    @functools.cached_property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    @functools.cached_property
    def sha256(self) -> str:
        """Hex SHA-256 of the tokenizer's settings and vocabulary."""
        library = getattr(self._tokenizer, "backend_tokenizer", None)
        return sha256_of_json(self._tokenizer.get_vocab() if library is None else library.to_str())

    @functools.cached_property
    def special_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids that the tokenizer adds before and after a text."""
        plain, whole = (
            tuple(self._tokenizer("a", add_special_tokens=special)["input_ids"])
            for special in (False, True)
        )
        size = len(plain)
        last = len(whole) - size
        first = next(i for i in range(last + 1) if whole[i : i + size] == plain)
        return whole[:first], whole[first + size :]

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
        """Encode texts without special tokens; a special token in a text is plain text.

        A text without tokens, such as white space for BERT, becomes one unknown or padding token. A
        text of more than ``LONGEST_PART`` characters is encoded in parts.

        Returns:
            The concatenated tokens [num_tokens], and the number of tokens of each text [num_texts].
        """
        tokenizer = self._tokenizer
        known = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        empty = np.array([next(token for token in known if token is not None)])
        rows: list[NDArray[np.integer]] = []
        for is_long, some in itertools.groupby(texts, lambda text: len(text) > LONGEST_PART):
            if is_long:
                in_parts = (parts(text, drop_space=False) for text in some)
                rows += [np.concatenate([self._encode([p])[0] for p in each]) for each in in_parts]
            else:
                rows += self._encode(list(some))
        rows = [ids if len(ids) else empty for ids in rows]
        tokens = np.concatenate(rows, dtype=token_type(self.vocab_size), casting="unsafe")
        return tokens, np.array([len(ids) for ids in rows], dtype=np.int32)

    def _encode(self, texts: list[str]) -> list[NDArray[np.int32]]:
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        return [np.array(ids, dtype=np.int32) for ids in encoded]


@contextlib.contextmanager
def _loading(folder: Path, what: str = "the model") -> Iterator[Any]:
    """Yield the module transformers, without its log; convert its errors into a UserError.

    Args:
        folder: folder of the model.
        what: what is loaded, for messages.
    """
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"{folder} is a Hugging Face model, which needs the package transformers: pip install "
            "'megatron-chameleon[hf]'"
        ) from None
    log = transformers.logging
    verbosity, shows_progress = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield transformers
    except (UserError, MemoryError):
        raise
    except Exception as error:  # the files of the folder can raise almost any error
        hint = "download the model again, or pass another"
        if "trust_remote_code" in str(error):
            hint = "if you trust the Python code in the folder, pass --trust-remote-code"
        raise UserError(
            f"{folder}: transformers cannot load {what} ({first_line(error)}); {hint}"
        ) from error
    finally:
        log.set_verbosity(verbosity)
        if shows_progress:
            log.enable_progress_bar()
