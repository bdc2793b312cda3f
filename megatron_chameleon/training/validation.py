"""Per-domain validation loss during training, in the training layout."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from megatron_chameleon.blend.sampler import Batch, read_ahead, require_embeddings
from megatron_chameleon.corpus.data_path import split_range
from megatron_chameleon.corpus.domains import DomainTokens
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.target import FEW_COMPARED, read_target_text, warn_leaked, warn_short
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.held_out import HeldOutText, choose_windows, reading_flops
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.storage import concurrently, is_remote
from megatron_chameleon.training.metrics import mean_losses, sum_over_ranks
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.step import Passes, domain_sums


class Validation:
    """Loss on fixed windows of every domain's valid split and of the target's texts.

    Held-out domains are included. Windows are numbered and batched like training samples. They
    ignore document boundaries, and tokens are scored as in `evaluate perplexity`. Validation uses
    no random numbers and reads no training samples.

    Args:
        texts: windows of each domain or text; None for a domain without text.
        names: names of the domains and texts.
        passes: passes of the trained model; validation batches have the shape of training batches.
        layout: layout of the ranks.
    """

    def __init__(
        self,
        texts: Sequence[HeldOutText | None],
        names: Sequence[str],
        passes: Passes,
        layout: Layout,
    ) -> None:
        self._texts, self._names, self._passes, self._layout = texts, names, passes, layout
        self._rows = [
            (domain, text, window)
            for domain, text in enumerate(texts)
            if text is not None
            for window in range(len(text.windows))
        ]
        shape = passes.shape
        self._global_batch_size = shape.num_microbatches * shape.micro_batch_size * layout.data_size

    def __len__(self) -> int:
        """Number of windows, rounded up to whole global batches."""
        return math.ceil(len(self._rows) / self._global_batch_size) * self._global_batch_size

    def batch(self, indices: Sequence[int]) -> Batch:
        """Stack the windows with these numbers; numbers past the last window yield no losses."""
        count, length = len(indices), self._passes.shape.seq_length
        batch = {
            "tokens": torch.zeros(count, length, dtype=torch.int64),
            "labels": torch.zeros(count, length, dtype=torch.int64),
            "loss_mask": torch.zeros(count, length),
            "position_ids": torch.arange(length).repeat(count, 1),
            "domain": torch.zeros(count, dtype=torch.int64),
        }
        for place, index in enumerate(indices):
            if index < len(self._rows):
                domain, text, window = self._rows[index]
                *parts, _ = text.arrays(window, window + 1)
                for name, part in zip(("tokens", "labels", "loss_mask"), parts, strict=True):
                    batch[name][place] = torch.from_numpy(part[0])
                batch["domain"][place] = domain
        return batch

    def flops(self, config: ModelConfig) -> float:
        """Forward FLOPs of one validation over all ranks, for a model of ``config``."""
        return sum(reading_flops(config, text) for text in self._texts if text is not None)

    def losses(self) -> dict[str, float]:
        """Name -> mean negative log-likelihood of its tokens in nats. Collective.

        Losses are the same in every layout, up to rounding.
        """
        passes, layout = self._passes, self._layout
        sums = torch.zeros(len(self._names), 3, dtype=torch.float64, device=passes.device)
        batches = require_embeddings(
            passes.shape.micro_batches(self, layout), passes.num_embeddings, self._names
        )
        with read_ahead(batches, passes.device) as ahead:
            while step := list(itertools.islice(ahead, passes.shape.num_microbatches)):
                losses = passes.token_losses(step)  # empty except on the last stage
                for batch, token_losses in zip(step, losses, strict=bool(losses)):
                    masked = token_losses * batch["loss_mask"]
                    sums += domain_sums(batch, len(self._names), masked)
        total, tokens, _ = sum_over_ranks(sums, layout).cpu().T.tolist()
        return mean_losses(self._names, total, tokens)


def build_validation(plan: TrainingPlan, passes: Passes, layout: Layout) -> Validation | None:
    """Build the run's validation; None if --eval-interval is 0 or exceeds the number of steps.

    Collective.

    Domains without text in their valid split are skipped with a warning.

    Raises:
        UserError: if files are damaged, or no domain has a valid split.
    """
    options = plan.options
    if not options.validates:
        return None
    interval = options.validation.eval_interval
    # Held-out domains and texts of the target do not count, so that they do not change the windows
    # of other domains.
    windows = options.validation.eval_iters * options.global_batch_size // len(plan.data.domains)
    if options.validation.eval_tokens is not None:
        windows = options.validation.eval_tokens // options.seq_length
    try:
        texts = held_out_texts(plan, max(windows, 1), held_out=True)
    except UserError as error:
        raise UserError(f"{error}; or pass --eval-interval 0") from error
    names = [*plan.data.names, *(domain.name for domain in plan.data.held_out)]
    empty = [name for name, text in zip(names, texts, strict=True) if text is None]
    if len(empty) == len(texts):
        raise UserError(
            f"--eval-interval {interval}: the valid split of {plan.data.where} is empty; change "
            "--split, or pass --eval-interval 0"
        )
    if empty:
        warnings.warn(
            f"validation skips domains without a valid split: {', '.join(empty)}", stacklevel=2
        )
    if plan.target:
        from_main(lambda: _warn_of_domains(plan))
    if plan.target and plan.target.texts:
        names += plan.target.texts
        texts += from_main(lambda: read_target_texts(plan, max(windows, 1)))
    return Validation(texts, names, passes, layout)


def read_target_texts(plan: TrainingPlan, max_windows: int) -> list[HeldOutText]:
    """Read up to ``max_windows`` windows of each text of the plan's target.

    Warns about short texts, and about documents that are in the training text.

    Raises:
        UserError: if a text or the tokenizer cannot be read.
    """
    assert plan.target is not None
    tokenizer, length = plan.open_tokenizer(), plan.options.seq_length
    source = SourceOptions((), text_key=plan.options.target.target_text_key)
    found = []
    for name in plan.target.texts:
        file = read_target_text(source, plan.target, name, tokenizer, max_windows * length)
        warn_short(name, file)
        _warn_leaked(plan, name, file)
        found.append(choose_windows(file.tokens[:], length, max_windows * length))
    return found


def _warn_of_domains(plan: TrainingPlan) -> None:
    """Warn about the target's held-out domains that are short, or in the training text."""
    assert plan.target is not None
    assert plan.valid is not None
    for domain in _local(plan.valid.held_out):
        if domain.name in plan.target.shares:
            file = domain.open_documents()
            warn_short(domain.name, file)
            _warn_leaked(plan, domain.name, file)


def _warn_leaked(plan: TrainingPlan, name: str, text: TokenFile) -> None:
    domains = {domain.name: domain for domain in _local(plan.data.domains)}

    def training_text(name: str) -> TokenFile:
        return domains[name].open_documents()

    warn_leaked(name, text, domains, training_text, plan.data.tokenizer.eod_id, FEW_COMPARED)


def _local(domains: Iterable[DomainTokens]) -> list[DomainTokens]:
    """Return the domains on this machine: reading single documents of others would take hours."""
    return [domain for domain in domains if not is_remote(str(domain.prefix))]


def held_out_texts(
    plan: TrainingPlan, max_windows: int, *, held_out: bool = False
) -> list[HeldOutText | None]:
    """Up to ``max_windows`` windows of each domain's valid split; None without text. Collective.

    With ``held_out``, the windows of the corpus's held-out domains follow. Rank 0 opens the files.
    The other ranks open a file when they first read it.

    Raises:
        UserError: if files are damaged, or --split leaves nothing for the valid split.
    """
    if plan.valid is None:
        split_range(plan.options.data.split, "valid")  # raises
    assert plan.valid is not None
    domains, length = plan.valid.domains, plan.options.seq_length
    if held_out:
        domains += plan.valid.held_out
    find = partial(validation_text, window_length=length, max_windows=max_windows)
    return from_main(lambda: concurrently(find, domains))


def validation_text(
    domain: DomainTokens, window_length: int, max_windows: int
) -> HeldOutText | None:
    """Evenly spaced windows in the text of ``domain``; None if there is no token to predict."""
    if domain.tokens < 2:
        return None
    file = domain.open()
    start = int(file.pointers[0]) // file.dtype.itemsize
    tokens, max_tokens = range(start, start + domain.tokens), max_windows * window_length
    return choose_windows(domain, window_length, max_tokens, tokens=tokens)
