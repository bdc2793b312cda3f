"""The formats by name, and the export itself."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

from megatron_chameleon.artifacts import Corpus, Mixture
from megatron_chameleon.artifacts.files import replacing, writing
from megatron_chameleon.artifacts.output_path import require_new
from megatron_chameleon.errors import UserError
from megatron_chameleon.exports import litgpt, megatron, olmo_core, tables, torchtitan
from megatron_chameleon.exports.content import Export, weighted_domains
from megatron_chameleon.options.export import ExportFormat, ExportOptions


@dataclasses.dataclass(frozen=True)
class Format:
    """How a format is written, and which options besides the common ones it heeds."""

    text: Callable[[Export], str]
    heeds: frozenset[str] = frozenset()


ONE_SPLIT = frozenset({"split"})
FORMATS: dict[ExportFormat, Format] = {
    "megatron-data-path": Format(megatron.data_path, ONE_SPLIT),
    "megatron-data-args": Format(megatron.data_args, ONE_SPLIT),
    "megatron-per-split": Format(megatron.per_split),
    "megatron-bridge": Format(megatron.bridge),
    "torchtitan": Format(torchtitan.sources),
    "olmo-core": Format(olmo_core.source_list, ONE_SPLIT | {"token_budget"}),
    "litgpt": Format(litgpt.combined_streaming_dataset),
    "csv": Format(tables.csv_table),
    "json": Format(tables.json_table),
}


def export_mixture(options: ExportOptions) -> None:
    """Write or print the mixture in the format asked for.

    Raises:
        UserError: for a mixture and a corpus that do not go together, an option that the format
            does not heed, a path that it cannot hold, or a file that cannot be written.
    """
    if options.output is not None and options.output.resolve() == options.mixture.resolve():
        raise UserError(f"--output {options.output} is the mixture itself; give another name")
    if options.output is not None and not options.overwrite:
        require_new([options.output], "choose another --output or pass --overwrite")
    text = exported_text(options)
    if options.output is None:
        sys.stdout.write(text)
        return
    with writing(options.output), replacing(options.output) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
    print(f"written to {options.output}")


def exported_text(options: ExportOptions) -> str:
    """What :func:`export_mixture` writes.

    Raises:
        UserError: as there.
    """
    chosen = FORMATS[options.format]
    _check_options(options, chosen)
    mixture, corpus = Mixture.load(options.mixture), Corpus.load(options.corpus)
    budget = mixture.token_budget if options.token_budget is None else options.token_budget
    domains = weighted_domains(mixture, corpus)
    return chosen.text(Export(domains, options.split or "train", budget))


def _check_options(options: ExportOptions, chosen: Format) -> None:
    for name in ("split", "token_budget"):
        if getattr(options, name) is not None and name not in chosen.heeds:
            flag = name.replace("_", "-")
            takers = ", ".join(known for known, form in FORMATS.items() if name in form.heeds)
            raise UserError(f"--{flag} does nothing for --format {options.format}; only {takers}")
    if options.token_budget is not None and options.token_budget <= 0:
        raise UserError(f"--token-budget {options.token_budget}: give a number above 0")
