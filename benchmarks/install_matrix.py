"""Install the wheel into fresh environments, by Python, installer and megatron-core release.

    python benchmarks/install_matrix.py
    python benchmarks/install_matrix.py --pythons 3.12 --installers uv --megatron-core 0.19.2

By default, the newest patch of every minor release of megatron-core that setup.py admits and that
installs on the Python.

Each environment gets torch first, so that the torch build of the index or of PIP_FIND_LINKS and
UV_FIND_LINKS is kept. In an empty folder, the commands are then listed, every module is imported,
and a small model is trained and embedded to compute a mixture. Results are merged into
benchmarks/results/install-matrix.json, and printed as a table in Markdown. This script needs only
the standard library, git and, for uv, uv on the PATH. Environments are removed afterwards.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/install-matrix.json"
IMPORT_ALL = """
import importlib, pkgutil, megatron_chameleon
missing, count = set(), 0
for module in pkgutil.walk_packages(megatron_chameleon.__path__, "megatron_chameleon."):
    try:
        importlib.import_module(module.name)
        count += 1
    except ModuleNotFoundError as error:  # packages of extras
        if error.name.split(".")[0] in ("megatron_chameleon", "megatron", "torch"):
            raise
        missing.add(error.name)
print(count, "modules; not imported, for lack of", ", ".join(sorted(missing)) or "nothing")
"""
# Commands of the smoke test; {bin} is the environment's folder of programs.
SMOKE = (
    "{bin}/megatron-chameleon train_tokenizer --input a.jsonl b.jsonl --output t.json "
    "--vocab-size 300",
    "{bin}/megatron-chameleon preprocess_data --input a=a.jsonl --input b=b.jsonl "
    "--tokenizer-model t.json --output corpus --min-tokens-per-split 1",
    "{bin}/torchrun --standalone --nproc-per-node 1 -m megatron_chameleon pretrain_gpt "
    "--corpus corpus --run-dir run --mixture uniform --model nano --train-iters 2 "
    "--lr-warmup-iters 1 --seq-length 32 --global-batch-size 2 --micro-batch-size 2",
    "{bin}/python -m megatron_chameleon compute_mixture --corpus corpus --checkpoint run "
    "--num-windows 8 --output mixture.json",
)


def main() -> int:
    """Test the chosen environments; return 1 if any of them fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pythons", nargs="+", default=["3.11", "3.12", "3.13"])
    parser.add_argument("--installers", nargs="+", default=["pip", "uv"], choices=["pip", "uv"])
    parser.add_argument("--megatron-core", nargs="+", help="default: see above")
    parser.add_argument("--torch", default="torch", help="requirement of torch")
    chosen = parser.parse_args()
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        wheel = build_wheel(Path(temporary))
        for python in chosen.pythons:
            releases = chosen.megatron_core or admitted_releases(find_python(python))
            for installer in chosen.installers:
                for release in releases:
                    where = {"python": python, "installer": installer, "megatron_core": release}
                    what = f"Python {python}, {installer}, megatron-core {release}"
                    print(f"== {what}", flush=True)
                    tested = test_environment(wheel, chosen.torch, **where)
                    row = {"what": what, **where, "date": f"{datetime.date.today()}", **tested}
                    same = [old for old in rows if all(old[key] == where[key] for key in where)]
                    if same and row["outcome"].startswith("untested"):
                        continue  # keep what another machine found
                    rows = [old for old in rows if old not in same] + [row]
                    rows.sort(key=lambda row: [str(row[key]) for key in where])
                    RESULTS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
                    failed |= row["outcome"].startswith("failed")
    print("\n".join(table(rows)))
    return int(failed)


def admitted_releases(program: str | None) -> list[str]:
    """Return the newest patches of megatron-core that setup.py admits and ``program`` installs."""
    releases = ROOT / "megatron_chameleon/parallel/releases.py"
    supported = re.search(r'^SUPPORTED = "(.*)"', releases.read_text(), re.MULTILINE)
    assert supported is not None
    command = [program or sys.executable, "-m", "pip", "index", "versions", "megatron-core"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"Available versions: (.*)", printed)
    assert found is not None
    from pip._vendor.packaging.specifiers import SpecifierSet

    admitted = list(SpecifierSet(supported[1]).filter(found[1].split(", ")))
    newest = {version.rpartition(".")[0]: version for version in reversed(admitted)}
    return list(newest.values())


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the files that git tracks."""
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, files):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name, follow_symlinks=False)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, "."]
    subprocess.run(command, check=True, cwd=folder / "source")
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_environment(
    wheel: Path, torch: str, python: str, installer: str, megatron_core: str
) -> dict[str, Any]:
    """Install into a fresh environment and run the checks; return the row of the results."""
    program = find_python(python)
    if program is None or (installer == "uv" and shutil.which("uv") is None):
        missing = f"Python {python}" if program is None else "uv"
        return {"outcome": f"untested: no {missing} on this machine"}
    with tempfile.TemporaryDirectory() as temporary:
        environment, work = Path(temporary, "environment"), Path(temporary, "work")
        write_text(work)
        if installer == "uv":
            create = ["uv", "venv", "-q", "--python", program, str(environment)]
            install = ["uv", "pip", "install", "-q", "--python", str(environment)]
        else:
            create = [program, "-m", "venv", str(environment)]
            install = [str(environment / "bin/python"), "-m", "pip", "install", "-q"]
        steps = {
            "create": [create],
            "install": [
                [*install, torch],
                [*install, str(wheel), f"megatron-core=={megatron_core}"],
            ],
            "help": [[str(environment / "bin/megatron-chameleon"), "--help"]],
            "imports": [[str(environment / "bin/python"), "-c", IMPORT_ALL]],
            "smoke": [command.format(bin=environment / "bin").split() for command in SMOKE],
        }
        return {**run_steps(steps, work), **versions(environment)}


def run_steps(steps: Mapping[str, Sequence[Sequence[str]]], work: Path) -> dict[str, Any]:
    """Run each step's commands in ``work``; return the outcome and the seconds of each step."""
    # Neither a checkout nor another environment may provide modules.
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    seconds = {}
    for name, commands in steps.items():
        begin = time.monotonic()
        for command in commands:
            done = subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True)
            if done.returncode != 0:
                print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
                return {"outcome": f"failed: {name}, status {done.returncode}", "seconds": seconds}
        seconds[name] = round(time.monotonic() - begin, 1)
        print(f"   {name}: {seconds[name]} s", flush=True)
    return {"outcome": "passed", "seconds": seconds}


def find_python(version: str) -> str | None:
    """Return an interpreter of this version: the newest one of pyenv, or one on the PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = pyenv.glob(f"versions/{version}.*/bin/python")
    patches = {path.parts[-3].rpartition(".")[2]: path for path in found}
    newest = max(filter(str.isdecimal, patches), key=int, default=None)
    return shutil.which(f"python{version}") if newest is None else str(patches[newest])


def write_text(work: Path) -> None:
    """Write two small domains of text."""
    work.mkdir()
    for name, words in (("a", "the cat sat on a mat "), ("b", "def f(x): return x + 1 ")):
        lines = (json.dumps({"text": words * (3 + n % 7) + str(n)}) for n in range(200))
        (work / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def versions(environment: Path) -> dict[str, str]:
    """Return the versions of Python, torch and numpy in an environment."""
    script = (
        "import platform; from importlib.metadata import version; "
        "print(platform.python_version(), version('torch'), version('numpy'))"
    )
    done = subprocess.run(
        [str(environment / "bin/python"), "-c", script], capture_output=True, text=True
    )
    return dict(zip(("python_version", "torch", "numpy"), done.stdout.split(), strict=False))


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of results in Markdown."""
    yield "| Python | Installer | megatron-core | torch | Outcome | Install, s | Smoke test, s |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        seconds = row.get("seconds", {})
        cells = (
            *(row.get("python_version", row["python"]), row["installer"], row["megatron_core"]),
            *(row.get("torch", ""), row["outcome"]),
            *(seconds.get(name, "") for name in ("install", "smoke")),
        )
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
