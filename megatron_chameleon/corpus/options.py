"""Options of preprocess_data, train_tokenizer and gather_installed_text.

Every class validates itself and raises UserError. Importing this module loads no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_chameleon.errors import UserError, quoted
from megatron_chameleon.ranges import (
    LARGEST_INT32,
    Between,
    CheckedOptions,
    Count,
    LargeCount,
    Processes,
    Share,
)

Inputs = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]
EncoderChoice = Literal["auto", "own", "gigatoken"]
Repetition = Literal["exact", "near"]
# A longer domain name is probably the text of another field, and too long for a file name.
MAX_DOMAIN_BYTES = 80
ALL_OTHERS = "*"
MIN_VOCABULARY = 258  # 256 byte tokens, the end-of-document token and one merge


def is_domain_name(name: str) -> bool:
    """Whether ``name`` is valid UTF-8 of 1 to ``MAX_DOMAIN_BYTES`` bytes."""
    try:
        return 0 < len(name.encode()) <= MAX_DOMAIN_BYTES
    except UnicodeEncodeError:
        return False


def flat(groups: tuple[tuple[str, ...], ...]) -> list[str]:
    """The values of a flag that may be repeated."""
    return [text for group in groups for text in group]


@dataclasses.dataclass(frozen=True)
class SourceOptions(CheckedOptions):
    """JSON lines, parquet and Hugging Face data sets to read; each line or row is a document."""

    input: Inputs
    """Files, folders or quoted globs of .jsonl, .jsonl.gz, .jsonl.zst or .parquet, or of text such
    as .txt, .md and .py, each of which is one document; as paths, as URLs of fsspec such as
    s3://BUCKET/FOLDER, or data sets by name:
    hf:OWNER/NAME[@REVISION][:CONFIG][#SPLIT], where CONFIG '*' selects all configs. NAME=PATH
    assigns all documents of PATH to the domain NAME; a domain may be named several times."""
    text_key: str = "text"
    """Key, or column, of the text; dots reach into nested objects. A null text is an empty
    document."""
    max_malformed_share: Share = 0.001
    """Malformed lines are skipped and reported. The run fails if their share of all lines is larger
    than this."""
    max_document_bytes: LargeCount = 1 << 28
    """Maximum bytes of a line or row. A longer one counts as malformed: the file probably has no
    line ends, and parsing would take several times as much memory."""


@dataclasses.dataclass(frozen=True)
class DomainOptions(CheckedOptions):
    """Domain and split of each document.

    Inputs without NAME= get their domain from one of the first three options.
    """

    domain_key: str | None = None
    """Key of the domain's name in each line; dots reach into nested objects, or into strings that
    hold JSON objects, as in meta.redpajama_set_name."""
    domain_from_path: str | None = None
    """A regular expression whose only group matches the domain's name in the path of a file, as in
    'data/([^/]+)/'."""
    domain_from_config: bool = False
    """Use the config of the data set as the domain."""
    rename_domain: Inputs = ()
    """OLD=NEW renames the domain OLD to NEW; several OLD may become one NEW. OLD= leaves the domain
    out, and '*=' leaves out every domain that has no rename."""
    valid_input: Inputs = ()
    """Validation text, in the format of --input; the whole text goes to the valid split. Hugging
    Face data sets use their own splits. If a domain has both validation and test text, all of its
    --input is used for training; otherwise --split divides its --input as usual."""
    test_input: Inputs = ()
    """Test text, in the format of --input; the whole text goes to the test split."""
    held_out: Inputs = ()
    """Domains that are never trained on, as NAME=PATH in the format of --input. They are validated,
    evaluated and embedded. The whole text goes to valid and test, in the proportions of --split,
    and is removed from the train split of every domain. NAME must not be a domain of --input."""

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other or have no effect."""
        super().__post_init__()
        used = self.domain_flags
        if len(used) > 1:
            raise UserError(f"{' and '.join(used)} both set the domain; leave one of them out")
        renames = flat(self.rename_domain)
        if renames and not used:
            raise UserError(
                f"--rename-domain {renames[0]} has no effect because every --input names its "
                "domain; change the name in --input"
            )
        _ = self.path_pattern, self.rename_table  # raise for invalid values

    @property
    def domain_flags(self) -> list[str]:
        """Flags in use that set the domain; [] if each ``--input`` names its domain."""
        flags = {
            "--domain-key": self.domain_key is not None,
            "--domain-from-path": self.domain_from_path is not None,
            "--domain-from-config": self.domain_from_config,
        }
        return [flag for flag, is_used in flags.items() if is_used]

    @functools.cached_property
    def path_pattern(self) -> re.Pattern[str] | None:
        """``domain_from_path``, compiled."""
        if self.domain_from_path is None:
            return None
        try:
            compiled = re.compile(self.domain_from_path)
        except (re.error, OverflowError, RecursionError) as error:
            raise UserError(
                f"--domain-from-path {self.domain_from_path}: not a regular expression ({error})"
            ) from error
        if compiled.groups != 1:
            raise UserError(
                f"--domain-from-path {self.domain_from_path} has {compiled.groups} groups, not 1; "
                "put the domain's name into the only group, and write other groups as (?:...)"
            )
        return compiled

    @functools.cached_property
    def rename_table(self) -> dict[str, str | None]:
        """OLD -> NEW, or None for a domain that is left out."""
        table: dict[str, str | None] = {}
        for rename in flat(self.rename_domain):
            old, equals, new = rename.rpartition("=")
            if not equals or not old or (new and not is_domain_name(new)):
                raise UserError(
                    f"--rename-domain {rename}: must be OLD=NEW with NEW of at most "
                    f"{MAX_DOMAIN_BYTES} bytes, or OLD= to leave it out"
                )
            if table.get(old, new or None) != (new or None):
                raise UserError(
                    f"--rename-domain {rename}: '{old}' is also renamed to '{table[old] or ''}'; "
                    "leave one of them out"
                )
            table[old] = new or None
        return table

    def renamed(self, name: str) -> str | None:
        """Return the corpus's name for the domain ``name`` of a source; None if it is left out."""
        return self.rename_table.get(name, self.rename_table.get(ALL_OTHERS, name))

    def report_renames(self, found: Mapping[str, int], unit: str) -> None:
        """Warn about domains that are left out, and about OLD names that no source has.

        Args:
            found: domain name in the sources -> number of its files or documents.
            unit: "files" or "documents".
        """
        left_out = {name: count for name, count in found.items() if self.renamed(name) is None}
        if left_out:
            warnings.warn(
                f"--rename-domain leaves out {sum(left_out.values()):,} {unit}, of "
                f"domains {quoted(left_out)}",
                stacklevel=3,
            )
        if unused := [name for name in self.rename_table if name not in {*found, ALL_OTHERS}]:
            warnings.warn(f"--rename-domain: no domain is called {quoted(unused)}", stacklevel=3)


@dataclasses.dataclass(frozen=True)
class EncoderOptions(CheckedOptions):
    """How text is encoded."""

    tiktoken_pattern: str | None = None
    """The pattern that splits text into words, for a tiktoken file: gpt2, cl100k_base, o200k_base,
    llama3 or a regular expression. Not needed for the published files of these four encodings."""
    encoder: EncoderChoice = "auto"
    """The library that encodes text; every choice gives the same tokens. 'auto' uses gigatoken,
    which is many times faster, if it gives the same ids as the tokenizer's own library on a sample
    of the text; 'own' always uses the tokenizer's own library; 'gigatoken' fails if gigatoken
    cannot be used."""


@dataclasses.dataclass(frozen=True)
class PreprocessOptions(CheckedOptions):
    """Turn text into a corpus: Megatron .bin/.idx files per domain and split, and corpus.json.

    The work is divided into shards. The same command resumes a run that was killed.
    """

    source: SourceOptions
    output: Path
    """The corpus folder to write. Until the corpus is complete, finished shards are kept in its
    subfolder .partial."""
    tokenizer_model: Path
    """A tokenizer.json, a vocab.json with its merges.txt, a tiktoken file, a SentencePiece .model,
    or a folder that holds one of them; the corpus keeps a copy."""
    domains: DomainOptions = dataclasses.field(default_factory=DomainOptions)
    encoding: EncoderOptions = dataclasses.field(default_factory=EncoderOptions)
    eod_token: str | None = None
    """The tokenizer's end-of-document token, appended to every document. Default: the end-of-text
    token of a Hugging Face folder, or else <|endoftext|>."""
    split: str = "90,5,5"
    """Relative shares of train, valid and test documents. A hash of a document's text decides its
    split, so the same text is never in two splits. Splits that a source defines are kept; if they
    assign a text to valid or test, the text is removed from train in every domain."""
    drop_duplicates: bool = True
    """Drop all but the first of a domain's documents with identical text; with
    --no-drop-duplicates, duplicates are only counted."""
    find_repeats: Repetition = "exact"
    """Which repeated documents of a domain are counted. 'near' also counts documents that are
    written but nearly repeat an earlier one, by MinHash of their tokens; it reads all tokens once
    more. It removes nothing."""
    max_tokens: LargeCount | None = None
    """Write a subset with about this many train tokens: each domain ends with the document that
    reaches its share of them, and its other text is not read. Documents have the splits that they
    have without this option. Validation and test text that a source defines, and --held-out, are
    not limited."""
    mixture: str | None = None
    """A mixture (.json) whose weights are the domains' shares of --max-tokens; a domain with a
    weight of 0 is left out. Default: 'uniform', equal shares."""
    min_tokens_per_split: int = 1
    """Fail if a domain has fewer tokens than this in train, valid or test. Domains of --held-out
    have no train split."""
    overwrite: bool = False
    """Replace the corpus in the output folder."""
    workers: Processes | None = None
    """Processes that work on shards concurrently, each with its own tokenizer. The default is the
    number of cores minus one; with 1, no other process is started."""
    shard_bytes: LargeCount = 256_000_000
    """Bytes of input on disk per shard. A killed run loses its unfinished shards. Compressed files
    are not divided. The corpus does not depend on this option."""
    shard: str | None = None
    """i/n: process every n-th shard, starting with the i-th, and stop. Use it on n machines that
    share the output folder; then run the same command without it to join the shards."""
    ray: bool = False
    """Process the shards as tasks on a Ray cluster, one core each, instead of --workers: on the
    cluster at $RAY_ADDRESS, or else on this machine. The machines of the cluster share the input,
    the tokenizer and the output folder, under the same paths. A killed worker repeats its shard."""

    def __post_init__(self) -> None:
        """Raise UserError for a value out of range, or options that contradict --ray."""
        super().__post_init__()
        _ = self.split_shares, self.shard_share  # raise for invalid values
        for flag, value in (("--workers", self.workers), ("--shard", self.shard)):
            if self.ray and value is not None:
                raise UserError(f"{flag} has no effect with --ray; leave out one of the two")
        if self.max_tokens is None:
            self.reject_changed(["mixture"], "has no effect without --max-tokens")
        elif self.shard is not None:
            raise UserError(
                f"--shard {self.shard}: a machine cannot know how much of --max-tokens the others "
                "have; leave it out, and use --workers or --ray"
            )

    @functools.cached_property
    def split_shares(self) -> tuple[float, float, float]:
        """Shares of train, valid and test that sum to 1."""
        try:
            train, valid, test = (float(part) for part in self.split.split(","))
        except ValueError:
            raise UserError(f"--split {self.split}: must be three numbers, as in 90,5,5") from None
        total = math.fsum((train, valid, test))
        if not (min(train, valid, test) > 0 and math.isfinite(total)):
            raise UserError(
                f"--split {self.split}: each share must be above 0, since mixtures are judged on "
                "held-out text"
            )
        return train / total, valid / total, test / total

    @functools.cached_property
    def shard_share(self) -> tuple[int, int] | None:
        """(i, n) of ``shard``, 1 <= i <= n; None for all shards."""
        if self.shard is None:
            return None
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.shard)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard {self.shard}: must be i/n with 1 <= i <= n, as in 3/8")
        return int(match[1]), int(match[2])


@dataclasses.dataclass(frozen=True)
class ImportOptions(CheckedOptions):
    """Write a corpus.json over existing Megatron .bin/.idx files, which are not copied or changed.

    Every prefix of --data-path, or every domain of --corpus, becomes a domain of the corpus.
    """

    output: Path
    """The corpus folder to write: corpus.json and a copy of the tokenizer. If weights are passed,
    data-path.json holds them as a mixture."""
    tokenizer_model: Path | None = None
    """The tokenizer that made the tokens: a tokenizer.json, a vocab.json with its merges.txt, a
    tiktoken file, a SentencePiece .model, or a folder that holds one of them. Required, except with
    --corpus."""
    data_path: str | None = None
    """Prefixes of .bin/.idx pairs, each with an optional weight in front, as for Megatron-LM:
    'PREFIX PREFIX' or '0.3 PREFIX 0.7 PREFIX'. NAME=PREFIX names the domain; by default it is the
    shortest unique end of the path."""
    data_args_path: Path | None = None
    """A file that holds the value of --data-path, possibly on several lines."""
    corpus: Path | None = None
    """An existing corpus, instead of --data-path: the new corpus has the same domains and links to
    the same token files, but trains on none of the --held-out domains."""
    held_out: str | None = None
    """Domains to hold out from training, separated by commas; they are validated, evaluated and
    embedded. All sequences of such a prefix of --data-path go to valid and test, in the proportions
    of --split; a weight in front of it must be 0. Such a domain of --corpus keeps its valid and
    test text."""
    split: str = "969,30,1"
    """Shares of train, valid and test in each .bin/.idx pair, in file order, as in Megatron-LM."""
    eod_token: str | None = None
    """The token that ends every document; default as in preprocess_data."""
    tiktoken_pattern: str | None = None
    """The pattern that splits text into words, for a tiktoken file, as in
    preprocess_data."""
    find_repeats: Repetition | None = None
    """Count the documents of each domain that repeat an earlier one: 'exact', with the same tokens,
    or 'near', also those that are nearly the same, by MinHash. Both read all tokens."""
    overwrite: bool = False
    """Replace the corpus in the output folder."""

    def __post_init__(self) -> None:
        """Raise UserError unless the data are named once, and with what they need."""
        super().__post_init__()
        if [self.data_path, self.data_args_path, self.corpus].count(None) != 2:
            raise UserError("pass one of --data-path, --data-args-path and --corpus")
        if self.corpus is None:
            if self.tokenizer_model is None:
                raise UserError("pass --tokenizer-model, the tokenizer that made the tokens")
        elif self.held_out is None:
            raise UserError(f"--corpus {self.corpus}: pass --held-out, the domains to hold out")
        else:
            settings = ("tokenizer_model", "split", "eod_token", "tiktoken_pattern", "find_repeats")
            self.reject_changed(settings, "does not apply to --corpus, which keeps its own")


@dataclasses.dataclass(frozen=True)
class TrainTokenizerOptions(CheckedOptions):
    """Train a tokenizer on text. The same text and options give the same file."""

    source: SourceOptions
    output: Path
    """The file to write: NAME.json trains byte-level BPE (tokenizers), NAME.model trains
    SentencePiece BPE with byte fallback."""
    vocab_size: Annotated[int, Between(MIN_VOCABULARY, LARGEST_INT32)] = 8192
    """Size of the vocabulary, the end-of-document token included."""
    eod_token: str = "<|endoftext|>"
    """The end-of-document token of the vocabulary."""
    overwrite: bool = False
    """Replace the output file."""

    def __post_init__(self) -> None:
        """Raise UserError for an unknown suffix or a value out of range."""
        super().__post_init__()
        if self.output.suffix not in (".json", ".model"):
            raise UserError(
                f"--output {self.output}: must end in .json for byte-level BPE, or in .model for "
                "SentencePiece"
            )


@dataclasses.dataclass(frozen=True)
class GatherOptions(CheckedOptions):
    """Collect real text in named domains from the installed packages."""

    output_dir: Path
    """Folder for one <domain>.jsonl per domain and a summary, gathered.json."""
    roots: tuple[Path, ...] = ()
    """Folders to read; default: this environment's site-packages."""
    num_domains: Count = 8
    """Number of domains to keep. The first domains of the ranked list with enough text are kept."""
    max_bytes_per_domain: LargeCount = 5_000_000
    """Maximum bytes of text in a domain, so that no domain dominates."""
    min_bytes_per_domain: int = 1_500_000
    """Minimum bytes of text in a domain, so that a held-out tenth of the text has at least 20,000
    tokens. A domain with less text is replaced by the next domain of the ranked list."""
    min_documents_per_domain: int = 50
    """Minimum number of documents in a domain. A domain with fewer documents is replaced by the
    next domain of the ranked list."""
    min_document_characters: int = 200
    """Skip shorter files."""
    max_document_bytes: LargeCount = 100_000
    """Maximum bytes of a document. Longer files are truncated after the last line that fits."""
