"""A person's mistake on several ranks: told once, in one line, without a traceback."""

from __future__ import annotations

import dataclasses
import re

from tests.distributed.launch import finish, flags, start, torchrun
from tests.distributed.layout_cases import (
    TP2,
    mixture_options,
    perplexity_options,
    training_options,
)
from tests.small_corpus import write_small_corpus

SECONDS = 120.0
FRAME_OF_OURS = re.compile(r'File ".*/(megatron_chameleon|tools)/.*", line')


def run_and_fail(places, tool: str, *arguments: str) -> str:
    """Run ``tool`` on two ranks and return the one error line that it ends with."""
    log = places.root / "mistake.log"
    log.unlink(missing_ok=True)
    status = finish(start(torchrun(2, f"tools/{tool}", *arguments), log), SECONDS)
    said = log.read_text()
    assert status != 0, said
    # torchrun's own status is 1 whatever its workers'; its summary tells theirs.
    assert status == 2 or re.search(r"rank +: 0 .*\n +exitcode +: 2 ", said), said
    assert not FRAME_OF_OURS.search(said), said
    errors = [line for line in said.splitlines() if re.match(r"(\[rank\d\]: )?error: ", line)]
    assert len(errors) == 1, said
    return errors[0]


def test_a_tensor_parallel_degree_that_does_not_divide_the_heads(places):
    options = training_options(places, "mistake", TP2)
    said = run_and_fail(places, "pretrain_gpt.py", *flags(options), "--model-size", "1.2b")
    assert re.search(r"--tensor-model-parallel-size 2 .* 25 attention heads; 1, 5, 25 do", said)
    assert not places.run("mistake").exists()


def test_a_corpus_that_is_not_there(results):
    places = results.places
    options = dataclasses.replace(perplexity_options(places, "tp2"), corpus=places.root / "lost")
    said = run_and_fail(places, "evaluate.py", "perplexity", *flags(options))
    assert re.search(r"lost/corpus\.json does not exist; tools/preprocess_data\.py", said)


def test_a_checkpoint_of_another_tokenizer(results, tmp_path):
    other = write_small_corpus(tmp_path / "corpus", tokenizer_hash="6" * 64)
    options = dataclasses.replace(
        mixture_options(results.places, "tp2", 1),
        corpus=other.root,
        output=tmp_path / "mixture.json",
    )
    said = run_and_fail(results.places, "compute_mixture.py", *flags(options))
    assert re.search(r"step-00000012 was trained with another tokenizer", said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]


def test_a_run_folder_of_other_options_which_only_the_first_rank_looks_into(results):
    options = training_options(results.places, "tp2", TP2)
    said = run_and_fail(results.places, "pretrain_gpt.py", *flags(options), "--seed", "99")
    assert re.search(r"runs/tp2 holds a run with --seed 1234, not 99; choose another", said)


def test_a_run_folder_that_cannot_be_written_which_only_the_first_rank_notices(places):
    options = training_options(places, "mistake", TP2)
    folder = places.corpus / "corpus.json" / "run"
    said = run_and_fail(places, "pretrain_gpt.py", *flags(options), "--run-dir", str(folder))
    assert re.search(r"cannot write .*corpus\.json/run: Not a directory", said)
