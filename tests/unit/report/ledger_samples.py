"""A run folder whose mixtures were made from runs and stores, which only tests read."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts import Cost, EmbeddingStore, Mixture, TrainingRun
from megatron_chameleon.report.cost import ledger_of, mixture_cost_table
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.report_samples import (
    NAMES,
    PROVENANCE,
    write_checkpoint,
    write_run_folder,
    write_training_run,
)

PROXY = Cost(3e12, 16.0, 8.0, 2)
STORE = Cost(4e11, 5.0, 2.5, 2)
OWN = Cost(0.0, 1.5, 1.5, 1)
REFERENCE, DOREMI_PROXY = Cost(5e12, 30.0, 15.0, 2), Cost(7e12, 50.0, 25.0, 2)


def write_weights(run_dir, content):
    """A checkpoint of one file in a run's folder; its hash."""
    digest = write_checkpoint(run_dir / "checkpoints/step-00000200", content)
    run = TrainingRun.load(run_dir)
    dataclasses.replace(run, checkpoints=["checkpoints/step-00000200"]).save()
    return digest


def edit_mixture(root, name, **changes):
    path = root / f"4-mixture/{name}.json"
    dataclasses.replace(Mixture.load(path), **changes).save(path)


def write_ledger_folder(root):
    """Two Chameleon mixtures of one proxy and one store, and two that share a reference run."""
    write_run_folder(root)
    model = write_weights(root / "2-proxy/tiny-seed1", b"proxy")
    store = EmbeddingStore.load(root / "3-embeddings")
    store = dataclasses.replace(store, recipe=dataclasses.replace(store.recipe, model_hash=model))
    store.save()
    made = dataclasses.replace(PROVENANCE, inputs={"corpus": "0", "checkpoint": model})
    for mode in ("pretrain", "finetune"):
        parameters = {"mode": mode, "embedding": dataclasses.asdict(store.recipe)}
        edit_mixture(root, f"chameleon-{mode}", parameters=parameters, provenance=made)
    work = root / "4-mixture/doremi"
    uniform = Mixture.uniform(NAMES).weights
    for name, cost in (("reference", REFERENCE), ("proxy", DOREMI_PROXY)):
        write_training_run(work / name, uniform, "uniform", cost=cost)
    write_method(root, "doremi", ["doremi/reference", "doremi/proxy"])
    write_method(root, "doremi-again", ["doremi/reference"])
    Mixture(uniform, method="uniform").save(root / "4-mixture/uniform.json")
    return root


def write_method(root, name, made_from, **parameters):
    weights = Mixture.uniform(NAMES).weights
    parameters["made_from"] = made_from
    mixture = Mixture(weights, method="doremi", parameters=parameters, cost=OWN)
    mixture.save(root / f"4-mixture/{name}.json")


def figures(cost):
    return (cost.flops, cost.device_seconds, cost.wall_seconds)


def note_of(root, name):
    folder = RunFolder.load(root)
    table = mixture_cost_table(ledger_of(folder), folder)
    return next((note for note in table.notes if note.startswith(f"Not found for {name},")), "")
