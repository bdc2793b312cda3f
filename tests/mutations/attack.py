"""Mutate one file of a workspace, run a tool that reads it, and classify the outcome.

    OMP_NUM_THREADS=1 python -m tests.mutations.attack --cases 2000 [--seed 0]

builds a small workspace with the project's own tools (corpus, proxy, store, mixtures, runs,
evaluation, swarm, sweep, Hugging Face folder). Each case copies it, mutates one file and runs a
tool that reads that file. A case is good if it is

    rejected   The exit status is 2, and one line begins with "error:".
    unchanged  The status is 0, and the result equals that of the unmutated workspace.
    edited     The status is 0, and the result differs, but users may edit such files: text,
               tokenizers, mixtures, and data of other programs.
    fallback   The status is 0, and the result differs because the tool used an older checkpoint; a
               warning names this checkpoint.

Every other outcome is a failure: a traceback, another status, more than one line, a hang, or a
different result without a warning.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pandas as pd

from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
from tests.mutations.mutate import mutate

ROOT = Path(__file__).resolve().parents[2]
DOMAINS = ("news", "code", "poems")
SECONDS_PER_CASE = 240.0  # most cases take seconds, but a busy machine is slower
MEMORY_BYTES = 12 << 30  # limit on data (RLIMIT_DATA) of each tool
HANG = 1000  # exit status recorded for a tool that does not end
OUTCOMES = ("rejected", "unchanged", "edited", "fallback")

TRAIN = (
    "--model nano --seq-length 32 --global-batch-size 4 --micro-batch-size 4 "
    "--lr-warmup-iters 1 --log-interval 1 --save-interval 2 --train-iters"
)
INPUTS = " ".join(f"--input {name}=text/{name}.jsonl" for name in DOMAINS)
WEIGH = "--corpus 1-corpus --checkpoint 2-proxy/nano-seed1 --num-windows 16 --store"
SWARM = (
    "--method regmix --corpus 1-corpus --num-proxies 8 --folds 2 --num-trees 20 --num-draws 500 "
    "--num-best 16 --model nano --train-iters 2 --accept-uncertain "
    "--seq-length 32 --global-batch-size 2 --lr-warmup-iters 1 --eval-tokens 64 "
    "--output 4-mixture/regmix.json"
)
SWEEP = (
    "--corpus 1-corpus --output sweep --model nano --train-iters 2 --seq-length 32 "
    "--global-batch-size 2 --micro-batch-size 2 --lr-warmup-iters 1 --num-windows 8 "
    "--sweep-ridge 0.1 1"
)


def _losses(run: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        records = {record["step"]: record for record in read_metrics(folder / run / METRICS_NAME)}
        last = [records.get(step) for step in (5, 6)]
        return [(record["loss"], record["domain_loss"]) if record else None for record in last]

    return read


def _without_provenance(folder: Path, path: str = "new.json") -> Any:
    varying = {"provenance", "cost", "parameters", "seconds", "checksum"}
    return {k: v for k, v in json.loads((folder / path).read_text()).items() if k not in varying}


def _bytes_of(pattern: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        paths = sorted(p for p in folder.glob(pattern) if p.is_file())
        return {str(p.relative_to(folder)): p.read_bytes() for p in paths}

    return read


# Name -> command of a tool that reads the workspace, and a function that reads its result.
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "preprocess": (
        f"preprocess_data.py {INPUTS} --output new-corpus --tokenizer-model tokenizer.json "
        "--split 80,10,10 --workers 1",
        _bytes_of("new-corpus/tokens/*"),
    ),
    "train": (
        "pretrain_gpt.py --corpus 1-corpus --mixture 4-mixture/chameleon.json --run-dir new-run "
        f"{TRAIN} 6",
        _losses("new-run"),
    ),
    "train-data-path": (
        "pretrain_gpt.py --data-path '0.6 foreign/a 0.4 foreign/b' "
        f"--tokenizer-model tokenizer.json --run-dir new-run {TRAIN} 6",
        _losses("new-run"),
    ),
    "resume": (
        "pretrain_gpt.py --corpus 1-corpus --mixture uniform --run-dir 5-base/stopped-seed1 "
        f"{TRAIN} 6",
        _losses("5-base/stopped-seed1"),
    ),
    "fine-tune": (
        f"pretrain_gpt.py --corpus 1-corpus --mixture uniform --run-dir new-run {TRAIN} 6 "
        "--pretrained-checkpoint huggingface",
        _losses("new-run"),
    ),
    "weigh": (
        f"compute_mixture.py {WEIGH} 3-embeddings --output new.json",
        _without_provenance,
    ),
    "embed": (f"compute_mixture.py {WEIGH} new-store --output new.json", _without_provenance),
    "regmix": (
        f"compute_mixture.py {SWARM}",
        lambda folder: _without_provenance(folder, "4-mixture/regmix.json"),
    ),
    "sweep": (f"sweep_mixture.py {SWEEP}", _bytes_of("sweep/*.csv")),
    "evaluate": (
        "evaluate.py perplexity --corpus 1-corpus --checkpoint 2-proxy/nano-seed1 "
        "--output new.json --max-tokens 256",
        _without_provenance,
    ),
    "report": ("make_report.py .", lambda _folder: None),
    "export": (
        "convert_mixture.py --mixture 4-mixture/chameleon.json --corpus 1-corpus "
        "--format megatron-per-split --output new.txt",
        _bytes_of("new.txt"),
    ),
    "to-huggingface": (
        "convert_checkpoint.py to-huggingface --checkpoint 2-proxy/nano-seed1 --output new-hf",
        _bytes_of("new-hf/*.safetensors"),
    ),
    "from-huggingface": (
        "convert_checkpoint.py from-huggingface --model huggingface --output new-checkpoint",
        _bytes_of("new-checkpoint/*.distcp"),
    ),
    "discover": (
        "discover_domains.py --corpus 1-corpus --checkpoint 2-proxy/nano-seed1 --discover 2 "
        "--fit-windows 200 --restarts 2 --output new-corpus",
        _bytes_of("new-corpus/tokens/*"),
    ),
}


# Kind of file -> pattern of its path, and names of the READERS that read such files.
KINDS: dict[str, tuple[str, str]] = {
    "text": ("text/*.jsonl", "preprocess"),
    "tokenizer": ("tokenizer.json", "preprocess train-data-path"),
    "corpus.json": ("1-corpus/corpus.json", "train embed evaluate discover resume"),
    "corpus tokenizer": ("1-corpus/tokenizer.json", "train embed evaluate to-huggingface"),
    "corpus tokens": ("1-corpus/tokens/*", "train embed evaluate discover resume"),
    "foreign tokens": ("foreign/*", "train-data-path"),
    "checkpoint.json": ("2-proxy/*/checkpoints/*/checkpoint.json", "embed evaluate to-huggingface"),
    "checkpoint files": ("2-proxy/*/checkpoints/*/*", "embed evaluate to-huggingface discover"),
    "run to resume": ("5-base/stopped-seed1/*.json*", "resume report"),
    "checkpoint to resume": ("5-base/stopped-seed1/checkpoints/*/*", "resume"),
    "store.json": ("3-embeddings/store.json", "weigh"),
    "store vectors": ("3-embeddings/*.safetensors", "weigh"),
    "mixture": ("4-mixture/chameleon.json", "train export report"),
    "evaluation": ("6-evaluation/*.json", "report"),
    "run": ("2-proxy/*/*.json*", "report embed evaluate"),
    "swarm": ("4-mixture/regmix/swarm/swarm.json", "regmix report"),
    "swarm members": ("4-mixture/regmix/swarm/members/*.json", "regmix report"),
    "sweep": ("sweep/**/*.json", "sweep"),
    "Hugging Face": ("huggingface/*", "fine-tune from-huggingface"),
}
# Kinds of files that users may edit, so that a mutation may change the result.
EDITABLE = {"text", "tokenizer", "foreign tokens", "mixture", "Hugging Face"}


def write_text(folder: Path) -> None:
    """Write texts of made-up words in three domains, which share half of the words."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(400)]
    folder.mkdir()
    for number, name in enumerate(DOMAINS):
        vocabulary = words[100 * number : 100 * number + 200]
        lines = [
            json.dumps({"text": " ".join(rng.choices(vocabulary, k=rng.randint(10, 120)))})
            for _ in range(120)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def build_workspace(folder: Path) -> None:
    """Write every kind of artifact below ``folder`` with the real tools."""
    folder.mkdir(parents=True)
    write_text(folder / "text")

    def tool(command: str) -> None:
        done = run_tool(command, folder)
        assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stderr}"

    tool(f"train_tokenizer.py {INPUTS} --output tokenizer.json --vocab-size 400")
    tool(
        f"preprocess_data.py {INPUTS} --output 1-corpus --tokenizer-model tokenizer.json "
        "--split 80,10,10 --workers 1"
    )
    train = f"pretrain_gpt.py --corpus 1-corpus --run-dir {{}} {TRAIN} {{}}"
    tool(train.format("2-proxy/nano-seed1", 4) + " --mixture uniform")
    tool(train.format("5-base/stopped-seed1", 6) + " --mixture uniform")
    # Make the run look as if it had been killed after step 4.
    shutil.rmtree(folder / "5-base/stopped-seed1/checkpoints/step-00000006")
    for step in (0, 1):
        (folder / "foreign").mkdir(exist_ok=True)
        for suffix in (".bin", ".idx"):
            source = folder / f"1-corpus/tokens/{DOMAINS[step]}-train{suffix}"
            shutil.copyfile(source, folder / f"foreign/{'ab'[step]}{suffix}")
    tool(f"compute_mixture.py {WEIGH} 3-embeddings --output 4-mixture/chameleon.json")
    tool(READERS["evaluate"][0].replace("new.json", "6-evaluation/stopped-seed1.json"))
    tool(READERS["to-huggingface"][0].replace("new-hf", "huggingface"))
    tool(READERS["regmix"][0])
    tool(READERS["sweep"][0])


def run_tool(command: str, folder: Path) -> CompletedProcess[str]:
    """Run ``tools/COMMAND`` in ``folder``, in a fork of this process.

    This process has imported torch, which saves seconds per tool. A fork copies only one thread, so
    this process has no other than that of pyarrow's allocator (jemalloc), which handles forks.
    """
    with tempfile.TemporaryDirectory() as logs:
        out, err = Path(logs, "out"), Path(logs, "err")
        child = multiprocessing.get_context("fork").Process(
            target=_become_tool, args=(shlex.split(command), folder, out, err)
        )
        child.start()
        child.join(SECONDS_PER_CASE)
        status = HANG if child.exitcode is None else child.exitcode
        if status == HANG and child.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.join()
        texts = (path.read_text(errors="replace") for path in (out, err))
        return CompletedProcess(command, status, *texts)


def _become_tool(command: Sequence[str], folder: Path, out: Path, err: Path) -> None:
    os.setsid()
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    os.chdir(folder)
    tool = ROOT / "tools" / command[0]
    sys.argv = [str(tool), *command[1:]]
    sys.path.insert(0, str(tool.parent))
    runpy.run_path(str(tool), run_name="__main__")


def judge(
    done: CompletedProcess[str], result: Callable[[], Any], expected: Any, *, editable: bool
) -> tuple[str, str]:
    """Classify the outcome of a case; for a failure, also return the reason."""
    if done.returncode == HANG:
        return "hang", "did not end in time"
    output, errors = done.stdout + done.stderr, done.stderr[-1500:]
    if "Traceback" in output:
        return "traceback", errors
    if "\x1b]" in output or "\x1b[2J" in output:
        return "escape sequence", "data reached the terminal unescaped"
    if done.returncode == 2:
        lines = [line for line in re.split(r"[\r\n]", done.stderr) if line.startswith("error:")]
        return ("rejected", "") if len(lines) == 1 else ("not one line", errors)
    if done.returncode != 0:
        return f"status {done.returncode}", errors
    try:
        found = result()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return "no result", f"status 0, and {error!r}"
    if found == expected:
        return "unchanged", ""
    if editable:
        return "edited", ""
    if re.search(r"^warning: .*: using \S*checkpoints/\S+$", done.stderr, re.MULTILINE):
        return "fallback", ""
    return "different", f"{str(found)[:300]} for {str(expected)[:300]}"


@contextlib.contextmanager
def copy_of(workspace: Path) -> Iterator[Path]:
    """A temporary copy of the workspace's folder."""
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(shutil.copytree(workspace, Path(temporary, "w")))


def run_case(number: int, seed: int, workspace: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Mutate a copy of ``workspace``, run a reader, and return the verdict.

    ``seed`` and ``number`` determine the mutation and the reader. If the outcome
    is good, the verdict's ``problem`` is empty.
    """
    rng = random.Random(f"{seed}-{number}")
    kind = list(KINDS)[number % len(KINDS)]
    pattern, readers = KINDS[kind]
    with copy_of(workspace) as folder:
        path = rng.choice(sorted(p for p in folder.glob(pattern) if p.is_file()))
        verdict: dict[str, Any] = {
            "number": number,
            "kind": kind,
            "file": str(path.relative_to(folder)),
        }
        mutation, reader = mutate(path, rng), rng.choice(readers.split())
        command, result = READERS[reader]
        done = run_tool(command, folder)
        outcome, problem = judge(
            done, lambda: result(folder), expected[reader], editable=kind in EDITABLE
        )
    verdict |= {"mutation": mutation, "reader": reader, "outcome": outcome, "problem": problem}
    return verdict


def expected_results(workspace: Path) -> dict[str, Any]:
    """Results of all readers on the unmutated workspace; every reader must succeed."""
    found = {}
    for name, (command, result) in READERS.items():
        with copy_of(workspace) as folder:
            done = run_tool(command, folder)
            assert done.returncode == 0, f"{name}: status {done.returncode}\n{done.stderr}"
            found[name] = result(folder)
    return found


def preload() -> None:
    """Import the modules of all tools once, before any fork. This must not start a thread."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # importing TorchInductor takes a second
    import megatron_chameleon.checkpoint.convert
    import megatron_chameleon.evaluation.perplexity
    import megatron_chameleon.methods.discovery.discover
    import megatron_chameleon.methods.sweep.sweep
    import megatron_chameleon.training.trainer  # noqa: F401
    from megatron_chameleon.methods.method import discover_methods

    discover_methods()


def attack(numbers: Iterable[int], seed: int) -> Iterator[dict[str, Any]]:
    """Run the cases ``numbers``, and return their verdicts."""
    preload()
    with tempfile.TemporaryDirectory() as temporary:
        workspace = Path(temporary, "workspace")
        build_workspace(workspace)
        expected = expected_results(workspace)
        for number in numbers:
            yield run_case(number, seed, workspace, expected)


def main() -> int:
    """Run all cases; print each failure at once, and counts at the end. Return 1 if any fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    verdicts = []
    for verdict in attack(range(options.cases), options.seed):
        verdicts.append(verdict)
        if verdict["outcome"] not in OUTCOMES:
            print(f"FAILED {verdict}", flush=True)
    table = pd.DataFrame(verdicts)
    print(pd.crosstab(table["kind"], table["outcome"], margins=True).to_string())
    return int(not table["outcome"].isin(OUTCOMES).all())


if __name__ == "__main__":
    sys.exit(main())
