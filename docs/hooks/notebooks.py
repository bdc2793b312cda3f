"""Convert notebooks to Markdown pages with their stored output."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FENCE = "~~~~"


def notebook_page(path: Path) -> str:
    """Return a notebook's text, code and output in Markdown."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts += [source]
        else:
            outputs = (shown for each in cell["outputs"] for shown in _output(each))
            parts += [_fenced(source, "python"), *outputs]
    return "\n\n".join(parts) + "\n"


def _output(output: Mapping[str, Any]) -> Iterator[str]:
    """Yield printed text, or the value of a cell as an image or text; warnings are left out."""
    if output["output_type"] == "stream":
        if output["name"] == "stdout":
            yield _fenced("".join(output["text"]).rstrip(), "text")
    elif "image/png" in output["data"]:
        png = "".join("".join(output["data"]["image/png"]).split())
        yield f'<img alt="output of the cell" src="data:image/png;base64,{png}">'
    else:
        yield _fenced("".join(output["data"]["text/plain"]), "text")


def _fenced(text: str, language: str) -> str:
    return f"{FENCE}{language}\n{text}\n{FENCE}"
