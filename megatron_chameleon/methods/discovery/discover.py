"""Domains for text without labels: clusters of documents by their embeddings, as a corpus."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import SPLITS, Corpus, Cost, Stopwatch
from megatron_chameleon.artifacts.discovered import (
    DiscoveredDomain,
    DiscoveredDomains,
    NearDocument,
)
from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.corpus.regroup import regroup
from megatron_chameleon.corpus.staging import corpus_folder
from megatron_chameleon.corpus.tokenizer import Tokenizer, corpus_tokenizer
from megatron_chameleon.methods.common.table import aligned
from megatron_chameleon.methods.discovery.clusters import (
    Clusters,
    Near,
    assign_documents,
    fit_clusters,
    nearest_documents,
)
from megatron_chameleon.methods.discovery.plan import DiscoverPlan, cluster_names, plan_discovery
from megatron_chameleon.methods.discovery.vectors import embed_missing
from megatron_chameleon.options.discover import DiscoverOptions
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.progress import progress_bar

PREVIEW_CHARACTERS = 100
# Enough for so many characters, but for text that is one token a byte.
_PREVIEW_TOKENS = 4 * PREVIEW_CHARACTERS
_LEAST_SHARE_SHOWN, _SHARES_SHOWN = 0.01, 4


def discover_domains(options: DiscoverOptions) -> None:
    """Cluster the documents of a corpus and write one of the clusters. Every rank calls this.

    Raises:
        UserError: for a mistake in the options or in what they name. What was embedded is kept.
    """
    with distributed(options.parallel, seed=0) as layout:
        plan = from_main(lambda: plan_discovery(options))
        cost = embed_missing(plan, layout)
        if layout.is_main:
            stopwatch = Stopwatch()
            clusters = assign_documents(plan, fit_clusters(plan))
            _warn_of_dissolved(plan, clusters)
            made = _write(plan, clusters, cost, stopwatch)
            print(_closing_words(plan, made))


def _warn_of_dissolved(plan: DiscoverPlan, clusters: Clusters) -> None:
    if clusters.dissolved:
        warnings.warn(
            f"{clusters.dissolved} of {len(clusters.fitted.centroids)} clusters had too little "
            "text in train, valid or test (--min-tokens-per-split "
            f"{plan.options.min_tokens_per_split}); their documents went to the nearest of the "
            f"other {len(clusters.centroids)}",
            stacklevel=2,
        )


def _write(
    plan: DiscoverPlan, clusters: Clusters, embedding: Cost, stopwatch: Stopwatch
) -> DiscoveredDomains:
    """Write the corpus with its record, all under their names at once; return the record."""
    names = cluster_names(plan.options.cluster_name, len(clusters.centroids), plan.numbers[-1])
    tokenizer = corpus_tokenizer(plan.corpus)
    total = int(clusters.tokens.sum()) * plan.corpus.token_bytes
    with corpus_folder(plan.options.output, overwrite=False, shared=False) as folder:
        made = folder.staging / "corpus"
        with writing(made):
            made.mkdir()
        with progress_bar(total, "B", "copying") as bar:
            domains = regroup(plan.corpus, clusters.labels, names, tokenizer, made, bar.update)
        tokenizer.save(made)
        cost = embedding + stopwatch.cost(num_devices=embedding.num_devices)
        kept = {name: c for name, c in plan.corpus.not_written.items() if name in domains}
        Corpus(
            root=made,
            tokenizer=plan.corpus.tokenizer,
            dtype=plan.corpus.dtype,
            domains=domains,
            provenance=plan.provenance,
            cost=cost,
            not_written=kept,
        ).save()
        record = _record(plan, clusters, names, tokenizer, made, cost)
        record.save()
        scaling = clusters.fitted.scaling
        record.save_centroids(clusters.centroids, scaling.mean, scaling.deviation)
        folder.publish(made)
    return record


def _record(
    plan: DiscoverPlan,
    clusters: Clusters,
    names: list[str],
    tokenizer: Tokenizer,
    root: Path,
    cost: Cost,
) -> DiscoveredDomains:
    fitted, recipe = clusters.fitted, plan.vectors.recipe
    nearest = nearest_documents(plan, clusters)
    return DiscoveredDomains(
        root=root,
        num_clusters=len(fitted.centroids),
        silhouettes=fitted.silhouettes,
        inertia=fitted.inertia,
        fitted_windows=fitted.windows,
        model_hash=recipe.model_hash,
        layer=recipe.layer,
        window_length=recipe.window_length,
        windows_per_document=recipe.windows_per_document,
        seed=plan.options.seed,
        dissolved=clusters.dissolved,
        domains={
            name: _described(plan, clusters, number, nearest[number], tokenizer)
            for number, name in enumerate(names)
        },
        divided=plan.names,
        provenance=plan.provenance,
        cost=cost,
    )


def _described(
    plan: DiscoverPlan, clusters: Clusters, number: int, nearest: list[Near], tokenizer: Tokenizer
) -> DiscoveredDomain:
    tokens = clusters.tokens[number]  # [domains, splits]
    by_domain = tokens.sum(axis=1)
    shares = by_domain / by_domain.sum()
    largest_first = np.argsort(-shares, kind="stable").tolist()
    return DiscoveredDomain(
        documents=int(clusters.documents[number]),
        tokens=dict(zip(SPLITS, tokens.sum(axis=0).tolist(), strict=True)),
        shares={plan.names[i]: float(shares[i]) for i in largest_first if shares[i] > 0},
        nearest=[
            NearDocument(near.domain, near.document, near.distance, _preview(plan, near, tokenizer))
            for near in nearest
        ],
    )


def _preview(plan: DiscoverPlan, near: Near, tokenizer: Tokenizer) -> str:
    """How a training document begins, with what does not print escaped."""
    tokens = open_tokens(plan.corpus, near.domain, "train").get(near.document)
    # The last one ends the document.
    text = tokenizer.decode(tokens[:-1][:_PREVIEW_TOKENS].tolist())
    return visible(text[:PREVIEW_CHARACTERS])


def visible(text: str) -> str:
    r"""``text`` on one line: characters that do not print, and backslashes, as in \n or \x1b."""
    return "".join(
        sign if sign.isprintable() and sign != "\\" else sign.encode("unicode_escape").decode()
        for sign in text
    )


def _closing_words(plan: DiscoverPlan, made: DiscoveredDomains) -> str:
    """The clusters in a table and one by one, what was written, and what to run next."""
    head = ["domain", "documents", *(f"{split} tokens" for split in SPLITS)]
    rows = [
        [name, f"{d.documents:,}", *(f"{d.tokens[split]:,}" for split in SPLITS)]
        for name, d in made.domains.items()
    ]
    scores = ", ".join(f"{k}: {score:.3f}" for k, score in made.silhouettes.items())
    fitted = f"silhouette by number of clusters, {made.fitted_windows:,} windows fitted: {scores}"
    described = "\n".join(_lines_on(name, domain) for name, domain in made.domains.items())
    output = plan.options.output
    proxy, corpus = shlex.quote(str(plan.options.checkpoint)), shlex.quote(str(output))
    return (
        f"{fitted}\n" + "\n".join(aligned([head, *rows])) + f"\n\n{described}\n\n"
        f"wrote {output}; {plan.vectors.folder} holds the embeddings: with it, other numbers of "
        "clusters take no embedding; remove it when you are done\n"
        f"next: torchrun --nproc-per-node 1 tools/compute_mixture.py --corpus {corpus} "
        f"--checkpoint {proxy} --output MIXTURE.json"
    )


def _lines_on(name: str, domain: DiscoveredDomain) -> str:
    shown = [
        f"{share:.0%} {original}"
        for original, share in domain.shares.items()
        if share >= _LEAST_SHARE_SHOWN
    ]
    more = ", ..." if len(shown) > _SHARES_SHOWN else ""
    lines = [f"{name}: {', '.join(shown[:_SHARES_SHOWN])}{more}"]
    return "\n".join([*lines, *(f"    {near.text}" for near in domain.nearest)])
