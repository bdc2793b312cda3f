"""Model configurations: GPT-2, Llama, Qwen2 and Qwen3, the paper's sizes and other presets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

from megatron_chameleon.artifacts.record import Count, Positive
from megatron_chameleon.errors import UserError
from megatron_chameleon.ranges import LARGEST_INT32

Activation = Literal["gelu", "gelu_tanh", "swiglu"]
"""Activation of the MLP: exact GELU (Hendrycks and Gimpel 2016), its tanh approximation, which the
public GPT-2 uses, or SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer")."""
Normalization = Literal["LayerNorm", "RMSNorm"]
INIT_STD = 0.02
"""Standard deviation of initial weights."""
PositionEmbedding = Literal["learned_absolute", "rope"]
MUP_RELEASE = "0.19"
"""Release of megatron-core for ``use_mup``. Earlier ones confuse the parameter groups of muP when
they load a checkpoint."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for sequences longer than those of the first training.

    Attributes:
        type: linear divides every frequency by ``factor`` (Chen et al. 2023, "Extending Context
            Window of Large Language Models via Positional Interpolation"); llama3 divides low
            frequencies only (Llama 3.1); yarn divides low frequencies and sharpens attention (Peng
            et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models").
        factor: ratio of the extended to the original sequence length.
        original_max_position_embeddings: sequence length of the first training (llama3, yarn).
        low_freq_factor: a wavelength above original length / this factor is divided (llama3).
        high_freq_factor: a wavelength below original length / this factor is unchanged (llama3).
        beta_fast: a dimension with more rotations in the original length is unchanged (yarn).
        beta_slow: a dimension with fewer rotations in the original length is divided (yarn).
        truncate: round the range between both betas to whole dimensions (yarn).
        attention_factor: factor of rotated queries and of rotated keys (yarn).
    """

    type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: Count = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that determines a model's parameters and what the model computes.

    Fields have the names of megatron's TransformerConfig and GPTModel. The defaults are GPT-2's.

    Attributes:
        num_layers: number of transformer layers.
        num_attention_heads: number of query heads.
        hidden_size: width of the hidden states.
        ffn_hidden_size: width of the MLP; with SwiGLU, of each of its two halves.
        vocab_size: size of the tokenizer's vocabulary, without padding.
        max_sequence_length: rows of the position table; with rotary positions, the length of the
            training sequences, which limits nothing.
        num_query_groups: heads of keys and values (grouped-query attention); 0 is replaced by
            ``num_attention_heads``.
        kv_channels: width of a head; 0 is replaced by ``hidden_size / num_attention_heads``.
        activation: activation of the MLP.
        normalization: norm before attention, before the MLP and after the last layer.
        layernorm_epsilon: number added to the variance in every norm.
        position_embedding_type: a learned table, or rotary positions (Su et al. 2021, "RoFormer").
        rotary_base: base of the rotary frequencies.
        rotary_percent: fraction of each head that is rotated.
        rope_scaling: scaling of the rotary frequencies; None for no scaling.
        qk_layernorm: normalize the queries and keys of each head.
        add_bias_linear: biases in all linear layers.
        add_qkv_bias: biases of queries, keys and values, even without ``add_bias_linear``.
        untie_embeddings_and_output_weights: the output layer has a matrix separate from the
            embedding.
        use_mup: maximal update parametrization (Yang et al. 2022, "Tensor Programs V", table 8), in
            which one learning rate fits all widths: logits are divided by the width's multiple of
            ``mup_base_hidden_size``, as are the variances of the initial weights of the layers and
            their learning rates, and attention scores by the width of a head.
        mup_base_hidden_size: width whose model is that of the standard parametrization; 0 with
            ``use_mup`` is replaced by the paper's 768.
        mup_base_head_dim: width of a head whose attention scores are those of the standard
            parametrization; 0 with ``use_mup`` is replaced by the paper's 64.

    Raises:
        ValueError: for fields that contradict each other; the message names the first such field.
    """

    num_layers: Positive
    num_attention_heads: Positive
    hidden_size: Positive
    ffn_hidden_size: Positive
    vocab_size: Positive
    max_sequence_length: Positive
    num_query_groups: Count = 0
    kv_channels: Count = 0
    activation: Activation = "gelu"
    normalization: Normalization = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    position_embedding_type: PositionEmbedding = "learned_absolute"
    rotary_base: float = 10_000.0
    rotary_percent: float = 1.0
    rope_scaling: RopeScaling | None = None
    qk_layernorm: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    untie_embeddings_and_output_weights: bool = False
    use_mup: bool = False
    mup_base_hidden_size: Count = 0
    mup_base_head_dim: Count = 0

    def __post_init__(self) -> None:
        """Resolve the derived defaults, and check the fields against each other."""
        heads = self.num_attention_heads
        if not self.kv_channels and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {heads}"
            )
        if self.num_query_groups and heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of num_query_groups "
                f"{self.num_query_groups}"
            )
        # Equal models compare equal, whether a derived value was passed or not.
        resolved = {
            "num_query_groups": self.num_query_groups or heads,
            "kv_channels": self.kv_channels or self.hidden_size // heads,
            "add_qkv_bias": self.add_qkv_bias or self.add_bias_linear,
            "mup_base_hidden_size": self.mup_base_hidden_size or 768 * self.use_mup,
            "mup_base_head_dim": self.mup_base_head_dim or 64 * self.use_mup,
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        can_rotate = self.rotary_percent <= 1 and self.rotary_dim > 0 and self.rotary_dim % 2 == 0
        if self.is_rotary and not can_rotate:
            raise ValueError(
                f"rotary_percent {self.rotary_percent} of kv_channels {self.kv_channels} is "
                f"{self.rotary_dim}, which is not a positive even number"
            )

    @property
    def mup_width_mult(self) -> float:
        """Multiple of the base width; 1 without ``use_mup``."""
        return self.hidden_size / self.mup_base_hidden_size if self.use_mup else 1.0

    @property
    def is_rotary(self) -> bool:
        """Whether positions are rotary, so that sequences of any length are possible."""
        return self.position_embedding_type == "rope"

    @property
    def max_positions(self) -> int:
        """Maximum number of tokens of a sequence; practically unlimited with rotary positions."""
        return LARGEST_INT32 if self.is_rotary else self.max_sequence_length

    @property
    def rotary_dim(self) -> int:
        """Number of rotated elements of each head."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_size(self) -> int:
        """Width of the keys of all groups, and also of the values."""
        return self.num_query_groups * self.kv_channels

    @property
    def fc1_size(self) -> int:
        """Width of the MLP's first product: gate and input of SwiGLU, or input of GELU."""
        return (2 if self.activation == "swiglu" else 1) * self.ffn_hidden_size

    @property
    def norm_parameters(self) -> int:
        """Number of parameters of a norm per element: weight, and LayerNorm's bias."""
        return 2 if self.normalization == "LayerNorm" else 1

    @property
    def layer_matrix_parameters(self) -> int:
        """Number of parameters of one layer's matrices."""
        attention = 2 * self.query_size + 2 * self.key_size
        return self.hidden_size * (attention + self.fc1_size + self.ffn_hidden_size)

    @property
    def sharded_bias_parameters(self) -> int:
        """Number of parameters of one layer's biases that tensor parallelism shards."""
        attention = self.query_size + 2 * self.key_size if self.add_qkv_bias else 0
        return attention + (self.fc1_size if self.add_bias_linear else 0)

    @property
    def replicated_layer_parameters(self) -> int:
        """Number of parameters of one layer that every tensor-parallel rank holds."""
        norms = 2 * self.hidden_size + (2 * self.kv_channels if self.qk_layernorm else 0)
        biases = 2 * self.hidden_size if self.add_bias_linear else 0
        return self.norm_parameters * norms + biases

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer."""
        sharded = self.layer_matrix_parameters + self.sharded_bias_parameters
        return sharded + self.replicated_layer_parameters

    @property
    def position_parameters(self) -> int:
        """Number of parameters of the position table."""
        return 0 if self.is_rotary else self.max_sequence_length * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Total number of parameters, with a tied embedding counted once and without padding."""
        matrices = 2 if self.untie_embeddings_and_output_weights else 1
        embeddings = matrices * self.vocab_size * self.hidden_size + self.position_parameters
        final_norm = self.norm_parameters * self.hidden_size
        return embeddings + self.num_layers * self.layer_parameters + final_norm

    def require_bytes(self, num_bytes: int, where: str) -> None:
        """Check that files of ``num_bytes`` can hold the model, before its memory is allocated.

        Raises:
            UserError: for less than 2 bytes per parameter; the message names ``where``.
        """
        if 2 * self.num_parameters > num_bytes:
            raise UserError(
                f"{where}: {self.num_parameters:,} parameters do not fit into the {num_bytes:,} "
                "bytes of its files, so it is damaged; use another copy"
            )


_llama = functools.partial(
    ModelConfig,
    activation="swiglu",
    normalization="RMSNorm",
    position_embedding_type="rope",
    add_bias_linear=False,
)
_untied_llama = functools.partial(_llama, untie_embeddings_and_output_weights=True)
# Llama 3 (Grattafiori et al. 2024, "The Llama 3 Herd of Models").
_llama3 = functools.partial(_llama, num_query_groups=8, rotary_base=500_000.0)

DEFAULT_MODEL = "82m"
PRESETS: dict[str, Callable[..., ModelConfig]] = {
    # Chameleon (ICML 2025), appendix, table of architectures.
    "60m": functools.partial(ModelConfig, 3, 6, 768, 3072),
    "82m": functools.partial(ModelConfig, 6, 12, 768, 3072),
    "124m": functools.partial(ModelConfig, 12, 12, 768, 3072),
    "210m": functools.partial(ModelConfig, 24, 16, 768, 3072),
    "684m": functools.partial(ModelConfig, 36, 24, 1200, 4800),
    "1.2b": functools.partial(ModelConfig, 36, 25, 1600, 6400),
    # RegMix (ICLR 2025): tinyllama_1M, tinyllama_60M and tinyllama_1_1b of the authors' code.
    "regmix-1m": functools.partial(_untied_llama, 2, 8, 256, 512),
    "regmix-60m": functools.partial(_untied_llama, 10, 8, 768, 1536),
    "regmix-1b": functools.partial(_untied_llama, 22, 16, 2048, 5632),
    # Proxies with 15M and 30M parameters without embeddings.
    "llama-15m": functools.partial(_llama, 8, 6, 384, 1024),
    "llama-30m": functools.partial(_llama, 8, 8, 512, 1792),
    # GaLore (Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank
    # Projection").
    "llama-130m": functools.partial(_untied_llama, 12, 12, 768, 2048),
    "llama-350m": functools.partial(_untied_llama, 24, 16, 1024, 2736),
    # Llama 3.2 1B and 3B, and Llama 3 8B.
    "llama-1b": functools.partial(_llama3, 16, 32, 2048, 8192),
    "llama-3b": functools.partial(_llama3, 28, 24, 3072, 8192),
    "llama-8b": functools.partial(
        _llama3, 32, 32, 4096, 14_336, untie_embeddings_and_output_weights=True
    ),
    # Qwen3 (Yang et al. 2025, "Qwen3 Technical Report").
    "qwen3-0.6b": functools.partial(
        _llama,
        28,
        16,
        1024,
        3072,
        num_query_groups=8,
        kv_channels=128,
        qk_layernorm=True,
        layernorm_epsilon=1e-6,
        rotary_base=1_000_000.0,
    ),
    # Sizes that are not from a paper, for tests and for the quickstart on two CPU cores.
    "nano": functools.partial(ModelConfig, 4, 4, 64, 256),
    "tiny": functools.partial(ModelConfig, 4, 4, 128, 512),
    "mini": functools.partial(ModelConfig, 6, 8, 256, 1024),
}


def preset(name: str, vocab_size: int, max_sequence_length: int) -> ModelConfig:
    """Return the model called ``name``.

    Raises:
        UserError: for an unknown name; the message lists the known names.
    """
    try:
        make = PRESETS[name]
    except KeyError:
        raise UserError(
            f"--model {name}: unknown model; pass the folder of a config.json, or one of "
            f"{', '.join(PRESETS)}"
        ) from None
    return make(vocab_size=vocab_size, max_sequence_length=max_sequence_length)


def name_of(config: ModelConfig) -> str | None:
    """Return the name of the preset that ``config`` is; None if there is no such preset."""
    sizes = config.vocab_size, config.max_sequence_length
    return next((name for name in PRESETS if preset(name, *sizes) == config), None)
