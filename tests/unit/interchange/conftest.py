"""A corpus of four domains and a mixture whose weights have no short decimal form."""

from __future__ import annotations

import json

import pytest

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.interchange import ConvertOptions
from megatron_chameleon.interchange.convert import converted_text
from tests.small_corpus import write_small_corpus

# 'poems' has a weight of zero, so most formats must not list it.
WEIGHTS = {"news": 0.1 + 0.2, "code": 1 / 7, "poems": 0.0, "wiki(en)": 1 - (0.1 + 0.2) - 1 / 7}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_small_corpus(tmp_path_factory.mktemp("exported") / "corpus", list(WEIGHTS))


@pytest.fixture(scope="session")
def mixture_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "mixture.json"
    path.write_text(json.dumps({"weights": WEIGHTS}))
    return path


@pytest.fixture(scope="session")
def weights(mixture_file):
    """Domain -> weight."""
    return Mixture.load(mixture_file).weights


@pytest.fixture(scope="session")
def sampled(weights):
    return {name: weight for name, weight in weights.items() if weight > 0}


@pytest.fixture
def export(corpus, mixture_file):
    """``export(format, **options)`` returns the exported text in this format."""

    def exported(chosen, **options):
        given = {"mixture": mixture_file, "corpus": corpus.root, **options}
        return converted_text(ConvertOptions(format=chosen, **given))

    return exported
