"""Test links and examples in the documentation: those of the API, and those of the tools' pages."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from docs.hooks import repository_links
from docs.hooks.tool_options import find_tools
from docs.hooks.tool_pages import examples_of_tools, tool_pages
from megatron_chameleon.artifacts import Mixture, TrainingRun
from megatron_chameleon.cli import parse_options, take_values
from megatron_chameleon.commands import command_names
from megatron_chameleon.mixture import chameleon_weights
from tests.huggingface_models import write_model, write_tokenizer
from tests.small_corpus import EOD, write_small_corpus

ROOT = Path(__file__).resolve().parents[3]
API = ROOT / "docs/api.md"


def anchors_of(markdown: str) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and code hosts form them."""
    text = re.sub(r"^(```+).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain}


def test_links_are_not_broken():
    for source in repository_links.markdown_sources(ROOT):
        for link in repository_links.links((ROOT / source).read_text(encoding="utf-8")):
            target = ROOT / repository_links.target_of(link, source)
            anchor = (link[2] or "").removeprefix("#")
            assert target.exists(), (source, link[0])
            assert not anchor or anchor in anchors_of(target.read_text("utf-8")), (source, link[0])


EXAMPLES = re.findall(r"^```python\n(.*?)^```", API.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def execute(tmp_path, monkeypatch, capsys):
    """``execute(number)`` executes an example of the API page and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def executed(number):
        exec(compile(EXAMPLES[number], str(API), "exec"), {"__name__": "example"})
        return capsys.readouterr().out

    return executed


def test_api_example_of_weights(execute, tmp_path):
    embeddings = np.random.default_rng(0).normal(size=(4, 8))
    np.save(tmp_path / "embeddings.npy", embeddings)
    assert execute(0) == f"{chameleon_weights(embeddings, 'pretrain').weights}\n"


def test_api_example_of_a_mixture(execute, tmp_path):
    write_model(tmp_path / "model", "llama")
    write_tokenizer(tmp_path / "model", [f"w{number}" for number in range(EOD)])
    rng = np.random.default_rng(0)
    for number, name in enumerate(("web", "code")):
        words = rng.integers(number * 99, number * 99 + 150, (100, 40))
        documents = [" ".join(f"w{word}" for word in document) for document in words]
        lines = [json.dumps({"text": document}) for document in documents]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    printed = execute(1)
    weights = Mixture.load(tmp_path / "mixture.json").weights
    assert set(weights) == {"web", "code"}
    assert sum(weights.values()) == pytest.approx(1)
    assert printed.endswith(f"{weights}\n")


def test_api_example_of_a_hook(execute, tmp_path):
    write_small_corpus(tmp_path / "corpus")
    execute(2)
    run = TrainingRun.load(tmp_path / "run")
    assert run.status == "finished"
    first, *later = run.mixture_phases
    assert len(later) == 2  # after steps 4 and 8
    assert all(phase.weights != first.weights for phase in later)


TOOLS = find_tools()


def test_every_tool_has_a_page_with_valid_examples():
    assert {f"tools/{name}.md" for name in command_names()} < set(tool_pages())
    assert set(examples_of_tools()) == set(TOOLS)
    for tool, example in examples_of_tools().items():
        for line in example.get("examples", "").replace("\\\n", " ").splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            words = shlex.split(line)
            start = words.index(tool)
            assert words[start - 1] in ("megatron-chameleon", "megatron_chameleon")
            arguments = [*words[start + 1 :], ">"]
            arguments = arguments[: arguments.index(">")]
            commands = TOOLS[tool].commands
            chosen, rest = take_values("--method", arguments)
            method = f"--method {chosen[0] if chosen else 'chameleon'}"
            key = next(key for key in ("", *arguments, method) if key in commands)
            own = rest if key == method else [word for word in arguments if word != key]
            parse_options(commands[key], own)
