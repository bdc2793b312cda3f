"""The model card of a training run: tables of its mixture, results and cost."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    DomainLoss,
    EvaluationResult,
    Mixture,
    MixtureStage,
    TrainingRun,
)
from megatron_chameleon.artifacts.downstream_result import DownstreamResult
from megatron_chameleon.artifacts.provenance import in_folder
from megatron_chameleon.artifacts.record import kind_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.cost import MixtureCost, ledger_of
from megatron_chameleon.report.downstream import DownstreamComparison, downstream_tables
from megatron_chameleon.report.run_folder import BASE, PROXY, RunFolder, run_labels, same_weights
from megatron_chameleon.report.tables import (
    MISSING,
    Table,
    cells_of,
    format_epochs,
    format_flops,
    format_hours,
    format_perplexity,
    four_decimals,
    markdown,
    markdown_table,
)
from megatron_chameleon.report.weights import Columns, weight_columns

MIXTURE_NAME = "mixture.json"


@dataclasses.dataclass(frozen=True)
class CardContent:
    """What a model card shows.

    Attributes:
        run: the training run.
        mixture: the mixture file that the run was started with; without such a file, or if the run
            changed the weights in another way, the weights that the run records, with the limits
            and sources of the file.
        mixture_cost: cost to obtain the mixture; None if it is unknown.
        perplexity: held-out perplexities of the run's last checkpoint.
        downstream: downstream scores of this checkpoint.
    """

    run: TrainingRun
    mixture: Mixture
    mixture_cost: MixtureCost | None
    perplexity: Sequence[EvaluationResult]
    downstream: Sequence[DownstreamResult]


def load_card_content(
    run: TrainingRun, checkpoint: CheckpointRecord, evaluations: Sequence[Path] | None
) -> CardContent:
    """Find the mixture, the results and the costs of ``run``.

    Args:
        run: the training run.
        checkpoint: its last checkpoint.
        evaluations: files of results; None takes the results of this checkpoint in the run folder
            whose stage 5-base or 2-proxy contains ``run``, if any.

    Raises:
        UserError: if an artifact is damaged, or a file of ``evaluations`` is of another checkpoint.
    """
    place = run.root.resolve().parent
    folder = RunFolder.load(place.parent) if place.name in (BASE, PROXY) else None
    results: list[EvaluationResult | DownstreamResult] = []
    if evaluations is not None:
        for path in evaluations:
            kind = DownstreamResult if kind_of(path) == DownstreamResult.KIND else EvaluationResult
            result = kind.load(path)
            if result.checkpoint_hash != checkpoint.hash:
                raise UserError(
                    f"--evaluations {path}: it evaluates {result.checkpoint}, not the weights of "
                    f"{checkpoint.root}; evaluate {run.root}"
                )
            results.append(result)
    elif folder is not None:
        results += [*folder.evaluations.values(), *folder.downstream.values()]
        results = [result for result in results if result.checkpoint_hash == checkpoint.hash]
    mixture, cost = _recorded_mixture(run, checkpoint), None
    file = _mixture_file(run, checkpoint)
    if file is not None:
        mixture = _used(Mixture.load(file, may_change=True), mixture, checkpoint.step)
        names = folder.paths if folder is not None else {}
        same = (key for key, other in names.items() if other.resolve() == file)
        name = next((key.rpartition("/")[2] for key in same), None)
        cost = None if folder is None or name is None else ledger_of(folder).mixtures.get(name)
    return CardContent(
        run,
        mixture,
        cost,
        [result for result in results if isinstance(result, EvaluationResult)],
        [result for result in results if isinstance(result, DownstreamResult)],
    )


def portable(content: CardContent) -> CardContent:
    """Copy whose run and mixture can be published: without absolute paths of this machine."""
    made_by, mixture = content.run.provenance, content.mixture
    sources = mixture.sources and {
        name: dataclasses.replace(
            source,
            files={
                split: list(map(made_by.portable_text, files))
                for split, files in source.files.items()
            },
        )
        for name, source in mixture.sources.items()
    }
    return dataclasses.replace(
        content,
        run=dataclasses.replace(content.run, provenance=made_by.portable()),
        mixture=dataclasses.replace(
            mixture,
            provenance=mixture.provenance and mixture.provenance.portable(),
            sources=sources,
        ),
    )


def _mixture_file(run: TrainingRun, checkpoint: CheckpointRecord) -> Path | None:
    """The file of ``--mixture``; None without one, or if it was moved or has other weights."""
    name = run.provenance.options.get("mixture")
    with in_folder(run.provenance.working_folder):
        path = Path(str(name)).resolve()
    if not name or not path.is_file():
        return None
    with contextlib.suppress(UserError):  # the file was replaced by something else
        return path if Mixture.load(path, may_change=True).hash == checkpoint.mixture_hash else None
    return None


def _used(file: Mixture, recorded: Mixture, num_steps: int) -> Mixture:
    """``file`` if its weights are those of ``recorded``; otherwise these with its limits."""
    planned, actual = (
        [MixtureStage(0, each.weights), *(each.stages or ())] for each in (file, recorded)
    )
    planned = [stage for stage in planned if stage.step < num_steps]
    if [stage.step for stage in planned] == [stage.step for stage in actual] and all(
        same_weights(one.weights, other.weights) for one, other in zip(planned, actual, strict=True)
    ):
        return file
    return dataclasses.replace(recorded, max_repetition=file.max_repetition, sources=file.sources)


def _recorded_mixture(run: TrainingRun, checkpoint: CheckpointRecord) -> Mixture:
    """The weights of all phases in ``run``."""
    batch_size = max(checkpoint.samples // max(checkpoint.step, 1), 1)
    phases = []
    for phase in run.mixture_phases:
        total = sum(phase.weights.values())
        weights = {name: weight / total for name, weight in phase.weights.items()}
        phases.append((phase.first_sample // batch_size, weights))
    (_, first), *later = phases or [(0, dict(run.mixture))]
    stages = [MixtureStage(step, weights) for step, weights in later]
    return Mixture(first, run.mixture_method, stages=stages or None)


def model_card(content: CardContent, name: str, model: str, *, loads_tokenizer: bool) -> str:
    """Write the card as Markdown, without front matter.

    Args:
        content: what the card shows.
        name: name of the repository.
        model: description of the model in one line.
        loads_tokenizer: whether AutoTokenizer loads the tokenizer of the repository.
    """
    run, mixture = content.run, content.mixture
    classes = ["AutoModelForCausalLM", *(["AutoTokenizer"] if loads_tokenizer else [])]
    code = [f"from transformers import {', '.join(classes)}", ""]
    code.append(f"model = AutoModelForCausalLM.from_pretrained({name!r})")
    if loads_tokenizer:
        code.append(f"tokenizer = AutoTokenizer.from_pretrained({name!r})")
    tables = [_data_table(run, mixture)]
    tables += [_perplexity_table(result) for result in content.perplexity]
    for result in content.downstream:
        (label,) = run_labels({run.root.name: run}, [run.root.name]).values()
        found = downstream_tables(DownstreamComparison({label: result}))
        # With a single number of shots, the last table repeats the first one.
        tables += found if len(result.protocol.shots) > 1 else found[:-1]
    files = {
        MIXTURE_NAME: "the domain weights, for `pretrain_gpt --mixture` of megatron_chameleon",
        TrainingRun.FILE_NAME: "record of the training run: options, versions, tokens, cost",
        "provenance.json": "command that wrote this repository, and the hash of the checkpoint",
    }
    pretrained = run.provenance.options.get("pretrained_checkpoint")
    start = f", starting from the weights of {markdown(str(pretrained))}," if pretrained else ""
    parts = [
        f"# {markdown(name.rpartition('/')[2])}",
        f"{markdown(model)}. It was trained{start} on {run.tokens:,} tokens of {len(run.mixture)} "
        f"domains with megatron_chameleon. The method {markdown(run.mixture_method)} set the "
        "weights of the domains, which are their shares of the training tokens.",
        "\n".join(["```python", *code, "```"]),
        *map(markdown_table, tables),
        markdown_table(_cost_table(content)),
        "\n".join(["## Files", "", "| File | Content |", "|---|---|"])
        + "".join(f"\n| `{file}` | {text} |" for file, text in files.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _data_table(run: TrainingRun, mixture: Mixture) -> Table:
    tokens = run.domain_tokens
    same = mixture if same_weights(mixture.weights, run.mixture) else None
    columns: Columns = weight_columns("", run.mixture, same)
    columns["tokens"] = {name: f"{each.actual:,}" for name, each in tokens.items()}
    columns["epochs"] = {name: format_epochs(each.epochs) for name, each in tokens.items()}
    total = ["total", f"{sum(each.actual for each in tokens.values()):,}", ""]
    notes = []
    if len(run.mixture_phases) > 1:
        notes = [
            "The weights changed during training; these are the weights at the last step. "
            f"{MIXTURE_NAME} lists all changes in stages."
        ]
        if any(phase.ramp_samples for phase in run.mixture_phases):
            notes.append(f"Linear changes begin at a stage; {run.FILE_NAME} has their lengths.")
    if weights := run.provenance.options.get("loss_weights"):
        notes.append(f"Weights of the token losses: {weights} (other domains: 1).")
    texts = pd.DataFrame(columns, list(run.mixture))
    return Table.by_row("Training data", "domain", texts, [total], notes)


def _perplexity_table(result: EvaluationResult) -> Table:
    def cells(loss: DomainLoss) -> list[str]:
        perplexities = cells_of(
            [loss.unigram_perplexity, loss.perplexity],
            format_perplexity,
            errors=[None, loss.perplexity_error],
        )
        bits, bits_error = loss.bits_per_byte, loss.bits_per_byte_error
        return [
            f"{loss.tokens:,}",
            *perplexities,
            *cells_of([bits], four_decimals, errors=[bits_error]),
        ]

    average = cells_of(
        [result.mean_perplexity], format_perplexity, errors=[result.mean_perplexity_error]
    )
    notes = [
        f"On {result.protocol.describe()}; ± is the standard error over documents. The unigram "
        "model predicts each token by its frequency in the domain's training text."
    ]
    if result.held_out:
        notes.append("Domains marked held-out are not in the average.")
    if result.left_out:
        notes.append(f"Domains without held-out text: {', '.join(result.left_out)}.")
    return Table.of(
        "Held-out perplexity",
        ["domain", "tokens", "unigram perplexity", "perplexity", "bits per byte"],
        [[result.label(name), *cells(loss)] for name, loss in result.domains.items()],
        [["average", *average, ""]],
        notes,
    )


def _cost_table(content: CardContent) -> Table:
    run = content.run
    rows = [
        ["parameters", f"{run.parameters:,}"],
        ["training tokens", f"{run.tokens:,}"],
        ["steps", f"{run.step:,}"],
        ["training FLOPs", format_flops(run.cost.flops)],
        ["training device-hours", format_hours(run.cost.device_seconds)],
        ["devices", str(run.cost.num_devices)],
    ]
    notes = ["FLOPs are counted from the model's shapes; device-hours are hours times devices."]
    cells = content.mixture_cost.cells() if content.mixture_cost is not None else [MISSING]
    if set(cells) != {MISSING}:  # a mixture of the user has no cost
        names = ("FLOPs of the mixture", "device-hours of the mixture")
        rows += map(list, zip(names, cells, strict=True))
        notes.append(
            "The cost of the mixture includes the proxies and embeddings that it was made from."
        )
    versions = run.provenance.versions.items()
    rows.append(["software", ", ".join(f"{package} {version}" for package, version in versions)])
    return Table.of("Training and cost", ["quantity", "value"], rows, notes=notes)
