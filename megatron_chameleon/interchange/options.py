"""Options of convert_mixture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_chameleon.errors import UserError
from megatron_chameleon.ranges import LARGEST_INT32, Between, CheckedOptions, LargeCount, flag_of

FormatName = Literal[
    "json",
    "csv",
    "megatron-data-path",
    "megatron-data-args",
    "megatron-per-split",
    "megatron-bridge",
    "automodel",
    "olmo-core",
    "levanter",
    "torchtitan",
    "litgpt",
    "olmix",
    "regmix",
]
# Formats that list the files of one split, and formats with weights of each split.
ONE_SPLIT: tuple[FormatName, ...] = (
    "megatron-data-path",
    "megatron-data-args",
    "olmo-core",
    "olmix",
)
PER_SPLIT: tuple[FormatName, ...] = ("megatron-per-split", "megatron-bridge", "automodel")
# Formats with a limit on repetition that a token budget determines.
LIMITED: tuple[FormatName, ...] = ("olmo-core", "olmix")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions(CheckedOptions):
    """Convert a mixture between the formats of several trainers. Weights are exact.

    Raises:
        UserError: for an option that does not apply to the formats, or a number out of range.
    """

    mixture: Path | None = None
    """The file to convert; alternatively, pass --tokens or --epochs."""
    tokens: str | None = None
    """Training tokens per domain, such as web=10e9,code=2e9. Their sum is the token budget."""
    epochs: str | None = None
    """Epochs of each domain's training text in --corpus, such as web=1,wiki=3. The sum of their
    tokens is the token budget."""
    format: FormatName
    """The format to write.

    'json': a mixture of this project.

    'csv': a table of domains.

    'megatron-data-path': the arguments of --data-path or --train-data-path, on one line.

    'megatron-data-args': the same arguments for --data-args-path, one domain per line.

    'megatron-per-split': a file for --per-split-data-args-path, with train, valid and test.

    'megatron-bridge': blend, blend_per_split and split of Megatron Bridge's GPTDatasetConfig.

    'automodel': a blend file for the paths of NeMo Automodel's MegatronPretraining.

    'olmo-core': OLMo-core's SourceMixtureList.

    'levanter': train_weights of levanter's data, with stages.

    'torchtitan': the sources of its InterleavedHuggingFaceTextDataLoader.

    'litgpt': arguments of CombinedStreamingDataset, with which litgpt's data modules mix text.

    'olmix': mix, data and priors of an Olmix configuration.

    'regmix': the YAML file with which RegMix trains a model."""
    mixture_format: FormatName = "json"
    """The format of --mixture."""
    corpus: Path | None = None
    """Folder written by preprocess_data or import_corpus. It determines the files and the number of
    tokens of each domain, and the names of the domains whose files a Megatron format lists. Every
    name in the mixture must be a domain of the corpus."""
    output: Path | None = None
    """The file to write; default: standard output."""
    overwrite: bool = False
    """Replace an existing output file."""
    rename: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """OLD=NEW renames the domain OLD of the mixture. The option can be repeated, and accepts
    several values."""
    at_step: Annotated[int, Between(0, LARGEST_INT32)] | None = None
    """Convert only the weights in force at this training step, for formats whose weights cannot
    change."""
    drop_max_repetition: bool = False
    """Leave out the limits on repetition, for formats that have none."""
    split: Literal["train", "valid", "test"] | None = None
    """The split whose files megatron-data-path, megatron-data-args, olmo-core and olmix list, or
    whose weights are read from megatron-per-split, megatron-bridge and automodel; default: train.
    Without this option, all splits that are read must have the same weights."""
    token_budget: LargeCount | None = None
    """Training tokens, from which olmo-core and olmix get limits on repetition if the mixture has
    none; default: the token budget of the mixture."""

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        sources = [flag_of(name) for name in ("mixture", "tokens", "epochs") if getattr(self, name)]
        if len(sources) != 1:
            raise UserError(
                f"{' and '.join(sources) or 'there is no mixture'}: pass one of --mixture FILE, "
                "--tokens web=10e9,code=2e9 and --epochs web=1,wiki=3"
            )
        if self.mixture is None:
            why = f"{sources[0]} sets the amounts of text"
            self.reject_changed(["mixture_format", "token_budget", "at_step"], why)
            self.reject_changed(["drop_max_repetition"], f"{sources[0]} has no limits")
        if self.epochs is not None and self.corpus is None:
            raise UserError("--epochs needs --corpus, which has the tokens of each domain")
        if self.format not in ONE_SPLIT and self.mixture_format not in PER_SPLIT:
            one, several = ", ".join(ONE_SPLIT), ", ".join(PER_SPLIT)
            reason = f"applies only to --format {one} or --mixture-format {several}"
            self.reject_changed(["split"], reason)
        if self.format not in LIMITED:
            self.reject_changed(["token_budget"], f"applies only to --format {', '.join(LIMITED)}")
        if self.output and self.mixture and self.output.resolve() == self.mixture.resolve():
            raise UserError(f"--output {self.output} is the mixture itself; choose another name")

    @property
    def renames(self) -> list[str]:
        """The values of all occurrences of ``--rename``."""
        return [rename for group in self.rename for rename in group]
