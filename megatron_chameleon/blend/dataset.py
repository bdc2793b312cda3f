"""Training samples drawn from the domains of a corpus by weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    _build_document_index,
    _build_shuffle_index,
)
from megatron.core.datasets.utils import Split as MegatronSplit
from megatron.core.datasets.utils import normalize
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus, Split, TokenizerIdentity
from megatron_chameleon.blend.index import build_blending_indices
from megatron_chameleon.corpus.indexed import open_split
from megatron_chameleon.errors import UserError

# Megatron shuffles the last epoch on its own where less than this share of it is used, so that
# its documents do not crowd out those of the whole epochs.
SEPARATE_FINAL_EPOCH_BELOW = 0.80


class DomainDataset(GPTDataset):
    """Megatron's GPT data set over one domain, with its indices in memory.

    Documents, samples and their order are Megatron's for the same seed and number of samples, but
    nothing is written beside the data and no rank waits for another: each builds its own.
    """

    def _build_document_sample_shuffle_indices(
        self,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint32]]:
        """Order of the documents, [samples + 1, 2] starts (document, offset), order of samples."""
        tokens_per_epoch = self._get_num_tokens_per_epoch()
        num_epochs = self._get_num_epochs(tokens_per_epoch)
        samples_before_final = self._whole_samples((num_epochs - 1) * tokens_per_epoch)
        separate_final = self._separates_final_epoch(
            num_epochs, samples_before_final, self._whole_samples(tokens_per_epoch)
        )
        # The document order is drawn before the sample order, from one stream, as in Megatron.
        random_state = np.random.RandomState(self.config.random_seed)
        document_index = _build_document_index(
            self.indices, num_epochs, random_state, separate_final
        )
        sample_index = helpers.build_sample_idx(
            np.array(self.dataset.sequence_lengths),
            document_index,
            self.config.sequence_length,
            num_epochs,
            tokens_per_epoch,
            self._drops_last_partial_sequence(),
            self.config.add_extra_token_to_sequence,
        )
        num_samples = sample_index.shape[0] - 1
        shuffle_index = _build_shuffle_index(
            samples_before_final if separate_final else num_samples, num_samples, random_state
        )
        return document_index, sample_index, shuffle_index

    def _whole_samples(self, tokens: int) -> int:
        extra = int(self.config.add_extra_token_to_sequence)
        return (tokens - extra) // int(self.config.sequence_length)

    def _separates_final_epoch(
        self, num_epochs: int, samples_before_final: int, samples_per_epoch: int
    ) -> bool:
        if num_epochs == 1:
            return False
        from_final = self.num_samples - samples_before_final
        return bool(from_final < int(SEPARATE_FINAL_EPOCH_BELOW * samples_per_epoch))

    def _drops_last_partial_sequence(self) -> bool:
        if self.index_split == MegatronSplit.valid:
            return bool(self.config.drop_last_partial_validation_sequence)
        return True


class BlendedTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of a corpus split, its domains blended by weight.

    Every rank builds the same index without the others, from its arguments alone. Domains of
    weight 0, and those too rare to give a sample, are never opened.

    Args:
        corpus: where the tokens are.
        split: which of its splits.
        weights: [num_domains] shares of the samples, in the order of ``corpus.names``; scaled to
            sum to 1.
        num_samples: length of the data set.
        seq_length: tokens per sample; the labels are the same tokens, one further on.
        seed: of the order of documents and samples within each domain.

    Item i is a dictionary of tokens [s] int64, labels [s] int64, loss_mask [s] float32,
    position_ids [s] int64 and domain [] int64, a position in ``corpus.names``.

    Raises:
        UserError: for weights that cannot be drawn by, or a domain with too few tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: Split,
        weights: Sequence[float],
        num_samples: int,
        seq_length: int,
        seed: int,
    ) -> None:
        check_weights(corpus, weights)
        check_enough_tokens(corpus, weights, seq_length, split)
        self.domain_index, self.domain_sample_index = _blend(weights, num_samples)
        counts = np.bincount(self.domain_index, minlength=len(weights))
        self.samples_per_domain: list[int] = counts.tolist()
        """How many samples each domain gives, in the order of ``corpus.names``."""
        config = _megatron_config(corpus, split, seq_length, seed)
        self._domains = [
            _open_domain(corpus, name, split, count, config) if count else None
            for name, count in zip(corpus.names, self.samples_per_domain, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.domain_index)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        domain = int(self.domain_index[index])
        dataset = self._domains[domain]
        assert dataset is not None, "the index names a domain that gives no samples"
        sample = dataset[int(self.domain_sample_index[index])]
        return {**sample, "domain": torch.tensor(domain, dtype=torch.int64)}


def check_weights(corpus: Corpus, weights: Sequence[float]) -> None:
    """Refuse weights that nothing can be drawn by.

    Raises:
        UserError: unless there is one finite, non-negative weight per domain and one is positive.
    """
    if len(weights) != len(corpus.names):
        raise UserError(
            f"{len(weights)} weights for the {len(corpus.names)} domains of {corpus.root}; "
            "give one for each"
        )
    for name, weight in zip(corpus.names, weights, strict=True):
        if not np.isfinite(weight) or weight < 0:
            raise UserError(f"weight of '{name}' is {weight}; weights are finite and not negative")
    if not any(weights):
        raise UserError("all weights are zero; give at least one domain a weight")


def check_enough_tokens(
    corpus: Corpus, weights: Sequence[float], seq_length: int, split: Split = "train"
) -> None:
    """Refuse a domain that is to be drawn from but holds less than one sequence.

    Raises:
        UserError: naming the domain and what would help.
    """
    for name, weight in zip(corpus.names, weights, strict=True):
        tokens = corpus.domains[name].split(split).tokens
        if weight > 0 and tokens < seq_length + 1:
            raise UserError(
                f"domain '{name}' has {tokens} tokens in {split}, fewer than one sequence of "
                f"{seq_length}+1; use a shorter --seq-length, more text, or weight 0"
            )


def _blend(
    weights: Sequence[float], num_samples: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The blended index over all domains, of which those of weight 0 give nothing."""
    every_weight = np.asarray(weights, dtype=np.float64)
    drawn = np.flatnonzero(every_weight).astype(np.int16)
    # Left in, a domain of weight 0 would win ties; normalised by Megatron's own function, the
    # weights are its own to the last bit.
    shares = normalize(every_weight[drawn].tolist())
    index, sample_index = build_blending_indices(shares, num_samples)
    return drawn[index], sample_index


@dataclasses.dataclass(frozen=True)
class _TokenizerFacts:
    """What Megatron's data sets ask of a tokenizer when the text is tokenised already."""

    eod: int
    vocab_size: int
    sha256: str

    @classmethod
    def of(cls, identity: TokenizerIdentity) -> _TokenizerFacts:
        return cls(identity.eod_id, identity.vocab_size, identity.sha256)

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _megatron_config(corpus: Corpus, split: Split, seq_length: int, seed: int) -> GPTDatasetConfig:
    prefixes = [str(corpus.prefix(name, split)) for name in corpus.names]
    blends = [(prefixes, None) if s.name == split else None for s in MegatronSplit]
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend_per_split=blends,
        tokenizer=_TokenizerFacts.of(corpus.tokenizer),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


def _open_domain(
    corpus: Corpus, name: str, split: Split, num_samples: int, config: GPTDatasetConfig
) -> DomainDataset:
    indexed = open_split(corpus, name, split)
    prefix: Path = corpus.prefix(name, split)
    documents = np.arange(len(indexed), dtype=np.int32)
    return DomainDataset(indexed, str(prefix), documents, num_samples, MegatronSplit[split], config)
