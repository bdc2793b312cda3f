"""Import rules that import-linter cannot express: which external packages a package may use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "megatron_chameleon"

# Folder or file -> packages that it may import besides the standard library and itself.
ALLOWED = {
    "mixture/regmix.py": {"numpy", "scipy", "lightgbm"},
    "mixture": {"numpy", "scipy"},
    "report": {
        *(f"{PACKAGE}.{name}" for name in ("artifacts", "console", "errors", "ranges")),
        *(f"{PACKAGE}.interchange.{name}" for name in ("mixture_runs", "published")),
        *("jinja2", "markupsafe", "matplotlib", "numpy", "pandas", "scipy", "tyro", "umap"),
        *("threadpoolctl", f"{PACKAGE}.training.options"),
    },
}


def forbidden_imports(path: str, source: str) -> list[str]:
    """Return the forbidden imports in ``source``; ``path`` is relative to the package."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{name.name}" for name in node.names]
    folder = path.partition("/")[0]
    allowed = ALLOWED.get(path, ALLOWED.get(folder))
    own = {f"{PACKAGE}.{folder}", *sys.stdlib_module_names}
    forbidden = {"tools", "torch", "megatron"} if folder == "artifacts" else {"tools"}

    def is_within(name: str, modules: set[str]) -> bool:
        return any(f"{name}.".startswith(f"{module}.") for module in modules)

    return [
        name
        for name in names
        if is_within(name, forbidden)
        or (allowed is not None and not is_within(name, allowed | own))
    ]


def test_every_module_follows_the_rules():
    for source in sorted((ROOT / PACKAGE).rglob("*.py")):
        path = source.relative_to(ROOT / PACKAGE).as_posix()
        assert forbidden_imports(path, source.read_text(encoding="utf-8")) == [], path


def test_commands_and_options_load_no_torch():
    files = [*(ROOT / PACKAGE).rglob("*options.py"), *(ROOT / PACKAGE / "commands").glob("*.py")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(files)]
    script = f"import sys, {', '.join(modules)}\n"
    script += "assert not {'torch', 'sklearn', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
