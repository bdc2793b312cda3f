"""Trained models as MixMin's experts: a run of pretrain_gpt per domain, or passed checkpoints.

WORK_DIR/NAME/corpus    the domain alone; its token files are those of the corpus
WORK_DIR/NAME/run       the run (run.json, metrics.jsonl, checkpoints)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import Corpus, Protocol, provenance
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.checkpoint.open_model import Model, open_model
from megatron_chameleon.corpus.import_corpus import link_corpus
from megatron_chameleon.corpus.indexed import in_memory
from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.evaluation.held_out import held_out_text, reading_flops
from megatron_chameleon.evaluation.perplexity import cluster_losses
from megatron_chameleon.methods.mixmin import MixminOptions
from megatron_chameleon.methods.mixmin.text import Blocks, TextCoder
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.methods.train_proxy import is_finished, training_options
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import default_window
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.training.checkpointing import check_run_folder
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import plan_training

# Windows of the full length in a forward pass of a rank.
WINDOWS_AT_ONCE = 32
# Probabilities are logarithms of sums, so none may be 0.
SMALLEST_PROBABILITY = float(np.finfo(np.float64).tiny)


def run_folders(options: MixminOptions, names: Sequence[str]) -> list[Path]:
    """Return the folder of each expert's run."""
    return [options.runs_folder / file_name_of(name) / "run" for name in names]


def check_training(options: MixminOptions, corpus: Corpus) -> None:
    """Check the options of the experts' runs; nothing is written.

    Raises:
        UserError: for invalid options.
    """
    folder = options.runs_folder / "run"
    plan_training(training_options(_proxy_of(options), corpus.root, folder))


def _proxy_of(options: MixminOptions) -> ProxyOptions:
    """Return the options of training, with the model that ``--experts`` names."""
    return dataclasses.replace(options.training, model=options.experts[0])


def plan_runs(
    options: MixminOptions, corpus: Corpus, names: Sequence[str]
) -> list[PretrainOptions]:
    """Return the options of each expert's run, after linking its corpus.

    An expert's run depends on its own domain only, so an added domain trains one more expert, and
    the others are finished.

    Raises:
        UserError: for a folder whose run is of other text or options.
    """
    proxy, runs = _proxy_of(options), list[PretrainOptions]()
    for name, run_dir in zip(names, run_folders(options, names), strict=True):
        folder = run_dir.parent
        alone = dataclasses.replace(corpus, domains={name: corpus.domains[name]}, held_out={})
        if Corpus.exists(folder / "corpus"):
            if Corpus.load(folder / "corpus").hash != alone.hash:
                raise UserError(
                    f"{folder} is the expert of other text than that of '{name}' in {corpus.root}; "
                    "delete the folder to train it again, or choose another --work-dir"
                )
        else:
            made_by = provenance(options, {"corpus": corpus.hash})
            link_corpus(corpus, folder / "corpus", [name], [], made_by)
        run = training_options(proxy, folder / "corpus", run_dir)
        check_run_folder(plan_training(run))
        runs.append(run)
    return runs


def trained_experts(names: Sequence[str], runs: Sequence[PretrainOptions]) -> dict[str, Model]:
    """Return domain -> model of its finished run."""
    assert all(is_finished(run.run_dir) for run in runs)
    return {name: open_model(run.run_dir) for name, run in zip(names, runs, strict=True)}


def passed_experts(values: Sequence[str], names: Sequence[str]) -> dict[str, Model]:
    """Open the models NAME=PATH of ``--experts``, one for each of ``names``, in their order.

    Raises:
        UserError: for a name that is unknown, repeated or missing, or a path without a model.
    """
    paths = dict[str, Path]()
    for value in values:
        # A name or a path may contain an equals sign.
        known = [name for name in names if value.startswith(f"{name}=")]
        name = max(known, key=len, default=value.partition("=")[0])
        if name not in names:
            raise UserError(
                f"--experts {value}: there is no domain '{name}' to weigh; pass NAME=PATH for each "
                f"of {format_names(names)}"
            )
        if name in paths:
            raise UserError(f"--experts: '{name}' is named twice; leave one out")
        paths[name] = Path(value[len(name) + 1 :])
    if missing := [name for name in names if name not in paths]:
        raise UserError(
            f"--experts: pass NAME=PATH for '{missing[0]}' too, or leave it out with --domains"
        )
    return {name: open_model(paths[name], "--experts") for name in names}


def check_experts(
    experts: Mapping[str, Model],
    corpus: Corpus | None,
    coder: TextCoder | None,
    options: ParallelOptions,
) -> tuple[dict[str, Model], int]:
    """Check that all experts read the target's tokens.

    Args:
        experts: domain -> model.
        corpus: corpus of the tokens; None for raw text.
        coder: tokenizer of raw text.
        options: layout of the ranks.

    Returns:
        The experts with the target's vocabulary, and the window length of all of them.

    Raises:
        UserError: for an expert of another tokenizer, or a model that cannot be partitioned.
    """
    found = dict[str, Model]()
    for name, model in experts.items():
        if corpus is not None:
            found[name] = model.for_corpus(corpus)
        elif isinstance(coder, Tokenizer):
            found[name] = model.for_tokens(coder.identity, coder.path, "--input")
        else:
            raise UserError(
                f"--experts: the expert of '{name}' does not read bytes; pass its tokenizer with "
                "--tokenizer-model"
            )
    window = min(default_window(model.config) for model in found.values())
    for model in found.values():
        check_model_layout(model.config, options, window)
    return found, window


def expert_probabilities(
    experts: Mapping[str, Model],
    blocks: Sequence[Blocks],
    window_length: int,
    eod_id: int,
    layout: Layout,
) -> tuple[Array, float]:
    """Predict the target with each expert. Collective.

    Each passage of the target is predicted separately, in windows without overlap; its first token
    is predicted from the end-of-document token.

    Args:
        experts: domain -> model.
        blocks: text of each part of the target.
        window_length: tokens that a forward pass predicts.
        eod_id: id of the end-of-document token.
        layout: layout of the ranks.

    Returns:
        Probabilities [n, k] of the n tokens of all blocks, above 0, and the FLOPs.

    Raises:
        UserError: if an expert's loss is not finite.
    """
    tokens = np.concatenate([block.tokens for block in blocks])
    lengths = np.concatenate([block.passages for block in blocks])
    file = in_memory(Path("target"), tokens, lengths.astype(np.int32))
    protocol = Protocol("valid", window_length, "documents", first_token="after-eod")
    text = held_out_text(file, protocol, eod_id)
    assert text is not None
    ends, columns, flops = np.arange(1, len(tokens) + 1), [], 0.0
    total = len(tokens) * len(experts)
    with progress_bar(total, " tokens", "experts", quiet=not layout.is_main) as bar:
        for name, model in experts.items():
            reader = model.reader(layout)
            losses = cluster_losses(text, ends, reader, WINDOWS_AT_ONCE, bar)
            flops += reading_flops(reader.config, text)
            if not np.isfinite(losses).all():
                raise UserError(
                    f"{model.where}: the expert of '{name}' has a loss that is not finite; train "
                    "it again with a lower --lr, or pass an earlier checkpoint"
                )
            columns.append(np.maximum(np.exp(-losses), SMALLEST_PROBABILITY))
    return np.column_stack(columns), flops
