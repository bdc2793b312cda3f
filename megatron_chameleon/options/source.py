"""Which text is read and to which domain and split it belongs, for every tool that reads text."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from megatron_chameleon.options.ranges import LargeCount, Share

Inputs = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]


@dataclasses.dataclass(frozen=True)
class SourceOptions:
    """Which text is read: JSON lines, parquet, and Hugging Face data sets; one document a line."""

    input: Inputs
    """Files, folders or quoted globs of .jsonl, .jsonl.gz, .jsonl.zst or .parquet, or data sets
    by name: hf:OWNER/NAME[@REVISION][:CONFIG][#SPLIT], CONFIG '*' for all of them. NAME=PATH makes
    all documents of PATH the domain NAME; a domain may be named several times."""
    text_key: str = "text"
    """Key of the text in each line, or column of it; dots reach into nested objects. A text that
    is null is an empty document."""
    max_malformed_share: Share = 0.001
    """Malformed lines are left out and reported; a larger share of all lines ends the run."""
    max_document_bytes: LargeCount = 1 << 28
    """A longer line, or text of a row, is malformed: it is most likely a file that has lost its
    line ends, and would take several times as much memory."""

    @property
    def inputs(self) -> list[str]:
        """What ``--input`` was given, over all its uses."""
        return _flat(self.input)


@dataclasses.dataclass(frozen=True)
class DomainOptions:
    """To which domain and split a text belongs.

    Inputs that are not given as NAME=PATH tell their domain themselves, in one way for all.
    """

    domain_key: str | None = None
    """Key of the domain's name in each line; dots reach into nested objects, or into a string that
    holds one, as in meta.redpajama_set_name."""
    domain_from_path: str | None = None
    """A regular expression whose one group is the domain's name in the path of a file, as in
    'data/([^/]+)/'."""
    domain_from_config: bool = False
    """The domain is the config of the data set that the text comes from."""
    rename_domain: Inputs = ()
    """OLD=NEW calls the domain OLD of the source NEW; several OLD may become one NEW. OLD= leaves
    it out, and '*=' every domain that is not named."""
    valid_input: Inputs = ()
    """Validation text, given like --input: all of it goes to valid as it is. Data sets by name
    give theirs by themselves. Where a domain has its own valid and test, all of its --input is for
    training; where it has only one of them, --split cuts its --input as usual."""
    test_input: Inputs = ()
    """Test text, likewise."""

    @property
    def renames(self) -> list[str]:
        """What ``--rename-domain`` was given, over all its uses."""
        return _flat(self.rename_domain)

    @property
    def valid_inputs(self) -> list[str]:
        """What ``--valid-input`` was given, over all its uses."""
        return _flat(self.valid_input)

    @property
    def test_inputs(self) -> list[str]:
        """What ``--test-input`` was given, over all its uses."""
        return _flat(self.test_input)


def _flat(groups: tuple[tuple[str, ...], ...]) -> list[str]:
    return [text for group in groups for text in group]
