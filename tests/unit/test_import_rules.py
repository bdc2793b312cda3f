"""Import rules that import-linter cannot express: which external packages a package may use."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_chameleon"

# Package -> what it may import besides the standard library and itself.
ALLOWED = {
    "mixture": {"numpy", "scipy"},
    "report": {
        f"{PACKAGE}.artifacts",
        f"{PACKAGE}.errors",
        f"{PACKAGE}.ranges",
        "jinja2",
        "markupsafe",
        "matplotlib",
        "numpy",
        "pandas",
        "tyro",
        "umap",
        "threadpoolctl",
    },
}
ALLOWED_IN_ONE_FILE = {"mixture/regmix.py": {"lightgbm"}}
# Package -> what no module of it may import; the prefix "" is the whole package.
FORBIDDEN = {"artifacts": {"torch", "megatron"}, "": {"tools"}}


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Every module that ``source`` imports, anywhere in it: (line, absolute dotted name).

    ``from a import b`` gives ``a.b``, since b may be a module. Imports under ``TYPE_CHECKING``, in
    functions and by ``importlib.import_module`` or ``__import__`` of a literal count as well.
    """
    here = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            parents = here.split(".")[: len(here.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            for name in node.names:
                yield node.lineno, base if name.name == "*" else f"{base}.{name.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            if isinstance(function, ast.Name):
                function = function.id
            if function in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def is_within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def broken_rules(path: str, source: str) -> list[str]:
    """The forbidden imports of ``source``; ``path`` is relative to the package."""
    module = ".".join([PACKAGE, *Path(path).with_suffix("").parts])
    is_package = Path(path).name == "__init__.py"
    module = module.removesuffix(".__init__")
    top = Path(path).parts[0]
    forbidden = FORBIDDEN[""] | FORBIDDEN.get(top, set())
    broken = []
    for line, name in imported_modules(source, module, is_package):
        allowed = {f"{PACKAGE}.{top}", *ALLOWED.get(top, ()), *ALLOWED_IN_ONE_FILE.get(path, ())}
        outside = top in ALLOWED and not (
            is_within(name, allowed) or is_within(name, set(sys.stdlib_module_names))
        )
        if outside or is_within(name, forbidden):
            broken.append(f"{path}:{line} imports {name}")
    return broken


def test_every_module_follows_the_rules():
    sources = sorted((ROOT / PACKAGE).rglob("*.py"))
    assert len(sources) > 10
    broken = [
        line
        for source in sources
        for line in broken_rules(
            source.relative_to(ROOT / PACKAGE).as_posix(), source.read_text(encoding="utf-8")
        )
    ]
    assert broken == []


@pytest.mark.parametrize(
    ("path", "source", "imported"),
    [
        ("mixture/leverage.py", "import torch", "torch"),
        ("mixture/leverage.py", "def f():\n    import pandas as pd", "pandas"),
        ("mixture/leverage.py", "from ..errors import UserError", f"{PACKAGE}.errors.UserError"),
        ("mixture/__init__.py", "from .. import artifacts", f"{PACKAGE}.artifacts"),
        ("mixture/leverage.py", "import importlib\nimportlib.import_module('torch')", "torch"),
        ("mixture/leverage.py", "import numpy_financial", "numpy_financial"),
        ("report/page.py", "import megatron_chameleon.mixture", f"{PACKAGE}.mixture"),
        ("artifacts/corpus.py", "if True:\n    from torch import Tensor", "torch.Tensor"),
        ("training/trainer.py", "from tools.doctor import main", "tools.doctor.main"),
        ("cli.py", "__import__('tools.doctor')", "tools.doctor"),
    ],
)
def test_forbidden_import_is_found(path, source, imported):
    (broken,) = broken_rules(path, source)
    assert broken.startswith(f"{path}:")
    assert broken.endswith(f"imports {imported}")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("mixture/leverage.py", "import math\nimport numpy as np\nfrom scipy.linalg import eigh"),
        (
            "mixture/leverage.py",
            "from .a import b\nfrom megatron_chameleon import mixture",
        ),
        ("mixture/regmix.py", "def f():\n    import lightgbm"),
        ("report/page.py", "from ..artifacts import Mixture\nimport matplotlib.pyplot as plt"),
        ("artifacts/corpus.py", "import numpy\nfrom megatron_chameleon.errors import UserError"),
        ("training/trainer.py", "import torch\nfrom torch.utils import data"),
    ],
)
def test_an_import_that_is_allowed_passes(path, source):
    assert broken_rules(path, source) == []


def test_options_and_interchange_load_no_torch():
    options = sorted(path.relative_to(ROOT) for path in (ROOT / PACKAGE).rglob("*options.py"))
    assert len(options) > 5
    modules = [".".join(path.with_suffix("").parts) for path in options]
    script = f"import sys, {PACKAGE}.interchange, {', '.join(modules)}\n"
    script += "assert not {'torch', 'sklearn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
