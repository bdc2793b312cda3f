"""On-disk artifacts passed between stages: all reading, validation and writing."""

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.corpus import (
    SPLITS,
    Corpus,
    Domain,
    DomainSplit,
    ImportedFile,
    NotWritten,
    Repeats,
    Split,
    TokenizerIdentity,
)
from megatron_chameleon.artifacts.embedding_store import EmbeddingRecipe, EmbeddingStore
from megatron_chameleon.artifacts.evaluation_result import (
    Clusters,
    DomainLoss,
    EvaluationResult,
    Protocol,
    TargetLoss,
    require_comparable,
)
from megatron_chameleon.artifacts.mixture import (
    DomainSource,
    Mixture,
    MixturePhase,
    MixtureStage,
    MixtureWarning,
    implied_epochs,
    normalized,
)
from megatron_chameleon.artifacts.provenance import Cost, Provenance, Stopwatch, provenance
from megatron_chameleon.artifacts.sweep import SettingValue, Sweep, SweepPoint
from megatron_chameleon.artifacts.target import TargetShares
from megatron_chameleon.artifacts.training_run import SampledTokens, TrainingRun

__all__ = [
    "SPLITS",
    "CheckpointRecord",
    "Clusters",
    "Corpus",
    "Cost",
    "Domain",
    "DomainLoss",
    "DomainSource",
    "DomainSplit",
    "EmbeddingRecipe",
    "EmbeddingStore",
    "EvaluationResult",
    "ImportedFile",
    "Mixture",
    "MixturePhase",
    "MixtureStage",
    "MixtureWarning",
    "NotWritten",
    "Protocol",
    "Provenance",
    "Repeats",
    "SampledTokens",
    "SettingValue",
    "Split",
    "Stopwatch",
    "Sweep",
    "SweepPoint",
    "TargetLoss",
    "TargetShares",
    "TokenizerIdentity",
    "TrainingRun",
    "find_checkpoint",
    "implied_epochs",
    "normalized",
    "provenance",
    "require_comparable",
]
