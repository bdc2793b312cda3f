from __future__ import annotations

import json
from pathlib import Path

from megatron_chameleon.artifacts.provenance import PACKAGES, provenance
from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions

OPTIONS = PreprocessOptions(SourceOptions((("a=x", "b=y"),)), Path("out"), Path("tok"))


def test_provenance_holds_options_as_json():
    made = provenance(OPTIONS, {"corpus": "c" * 64})
    assert made.options == json.loads(json.dumps(made.options))
    assert made.options["source"]["input"] == [["a=x", "b=y"]]
    assert made.options["output"] == "out"
    assert set(made.versions) == {"python", *PACKAGES}
