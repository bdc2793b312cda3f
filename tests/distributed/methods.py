"""Run DoReMi, DoGE, Chameleon and discovery for the sections of ranks.py."""

from __future__ import annotations

import dataclasses
import os

from megatron_chameleon.methods.chameleon import (
    ChameleonOptions,
    ExtractionOptions,
    WeightingOptions,
)
from megatron_chameleon.methods.chameleon.compute import compute_mixture
from megatron_chameleon.methods.discovery import DiscoverOptions, DocumentEmbeddingOptions
from megatron_chameleon.methods.discovery.discover import discover_domains
from megatron_chameleon.methods.doge import DogeOptions, DogeRuleOptions
from megatron_chameleon.methods.doge.compute import Doge
from megatron_chameleon.methods.doremi import DoremiOptions, DoremiRuleOptions
from megatron_chameleon.methods.doremi.compute import Doremi
from megatron_chameleon.methods.options import PriorOptions, ProxyOptions
from tests.distributed import cases
from tests.distributed.cases import Case, Places
from tests.small_corpus import PREDICTABLE, write_small_corpus


def proxy_options(places: Places, name: str, case: Case) -> ProxyOptions:
    """Options of a short proxy run, otherwise with the values of ``cases.training_options``."""
    run = dataclasses.replace(
        cases.training_options(places, name, case),
        train_iters=cases.PROXY_ITERS,
        save_interval=cases.PROXY_SAVE_INTERVAL,
    )
    fields = [field.name for field in dataclasses.fields(ProxyOptions)]
    return ProxyOptions(**{field: getattr(run, field) for field in fields})


def doremi(places: Places, name: str, case: Case) -> None:
    """Run DoReMi with the one-rank run of the same model as reference."""
    options = DoremiOptions(
        corpus=places.corpus,
        output=places.run(name) / "mixture.json",
        work_dir=places.run(name),
        reference=places.run(f"one-{case.model}"),
        rule=DoremiRuleOptions(doremi_eta=0.5),
        proxy=proxy_options(places, name, case),
        fallback=PriorOptions(accept_uncertain=True),
    )
    assert Doremi.compute(options)


def doge(places: Places, name: str, case: Case) -> None:
    """Run DoGE with all domains."""
    options = DogeOptions(
        corpus=places.corpus,
        output=places.run(name) / "mixture.json",
        work_dir=places.run(name),
        rule=DogeRuleOptions(doge_mu=0.01, doge_eps=0.01),
        proxy=proxy_options(places, name, case),
        fallback=PriorOptions(accept_uncertain=True),
    )
    assert Doge.compute(options)


def doge_without_gain(places: Places, name: str, case: Case) -> None:
    """Run DoGE on a corpus for whose average MixMin predicts no gain."""
    corpus = places.run(name) / "corpus"
    if os.environ["RANK"] == "0":
        write_small_corpus(corpus, counts=PREDICTABLE)
    output = places.run(name) / "mixture.json"
    options = DogeOptions(corpus=corpus, output=output, proxy=proxy_options(places, name, case))
    assert Doge.compute(options)


def discover(places: Places, name: str) -> None:
    """Cluster two of the corpus's domains by embeddings of the run 'one'."""
    options = DiscoverOptions(
        corpus=places.corpus,
        checkpoint=places.run("one"),
        discover="2,4",
        output=places.run(name),
        domains="news,poems",
        restarts=3,
        embedding=DocumentEmbeddingOptions(
            windows_per_document=2, fit_windows=100, embedding_batch_size=16
        ),
        parallel=cases.reading_layout(cases.DISCOVERING[name]),
    )
    discover_domains(options)


def embed_with_bert(places: Places, name: str) -> None:
    """Embed the corpus with a BERT, which the first layout writes."""
    # Import these modules after the fork, since transformers may start threads.
    from tests.huggingface_models import write_digits_tokenizer, write_model

    folder = places.huggingface("bert")
    if name == cases.one_rank(name):
        write_digits_tokenizer(write_model(folder, "bert"))
    options = ChameleonOptions(
        corpus=places.corpus,
        checkpoint=folder,
        output=places.run(name) / "mixture.json",
        extraction=ExtractionOptions(num_windows=cases.NUM_WINDOWS, embedding_batch_size=5),
        weighting=WeightingOptions(bootstrap_resamples=20),
        parallel=cases.reading_layout(cases.EMBEDDING[name]),
    )
    compute_mixture(options)


def chameleon(places: Places, name: str, layer: int) -> ChameleonOptions:
    """Options to embed one layer of the run READ in the layout of a reading."""
    reading = cases.READINGS[name]
    return ChameleonOptions(
        corpus=places.corpus,
        checkpoint=places.run(cases.READ),
        output=places.mixture(name, layer),
        extraction=ExtractionOptions(
            layer=layer,
            final_norm=layer == cases.NORMED_LAYER,
            num_windows=cases.NUM_WINDOWS,
            embedding_batch_size=reading.batch_size,
        ),
        weighting=WeightingOptions(bootstrap_resamples=20),
        parallel=cases.reading_layout(reading.case),
    )
