"""What is there under several names, by links, is counted once."""

from __future__ import annotations

import shutil

import pytest

from megatron_chameleon.report.ledger import ledger_of
from megatron_chameleon.report.merged import merge
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.ledger_samples import (
    OWN,
    PROXY,
    write_ledger_folder,
    write_method,
)


@pytest.fixture
def root(tmp_path):
    return write_ledger_folder(tmp_path / "run")


def total(root):
    return ledger_of(RunFolder.load(root)).total.device_seconds


def test_a_linked_proxy_counts_once_and_under_its_own_name(root):
    folder = RunFolder.load(root)
    before, costs = ledger_of(folder), folder.costs()
    for link in ("2-proxy/latest", "2-proxy/zzz", "5-base/proxy"):
        (root / link).symlink_to(root / "2-proxy/tiny-seed1", target_is_directory=True)
    folder = RunFolder.load(root)
    assert {"latest", "zzz"} <= set(folder.proxies)
    assert folder.costs() == costs
    after = ledger_of(folder)
    assert after.entries == before.entries
    # Those made from the proxy, which is found by its weights, paid for the same one.
    assert after.mixtures == before.mixtures


def test_what_is_trained_elsewhere_and_linked_counts_where_it_lies(root):
    (root / "2-proxy/base").symlink_to(root / "5-base/uniform-seed1", target_is_directory=True)
    entries = ledger_of(RunFolder.load(root)).entries
    assert "5-base/uniform-seed1" in entries
    assert "2-proxy/base" not in entries


def test_linked_results_mixtures_and_stores_count_once(root):
    before = total(root)
    for link, goal in (
        ("4-mixture/best.json", "chameleon-pretrain.json"),
        ("6-evaluation/again.json", "uniform-seed1.json"),
    ):
        (root / link).symlink_to(goal)
    (root / "4-mixture/best.embeddings").symlink_to(root / "3-embeddings")
    write_method(root, "doge", ["best.json"])
    ledger = ledger_of(RunFolder.load(root))
    assert total(root) == pytest.approx(before + OWN.device_seconds)
    assert "4-mixture/chameleon-pretrain" in ledger.mixtures["doge"].parts
    assert ledger.mixtures["best"].cost == ledger.mixtures["chameleon-pretrain"].cost


def test_a_link_into_another_folder_counts_there_alone(root, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(root, other)
    shutil.rmtree(other / "2-proxy/tiny-seed1")
    for link in ("2-proxy/latest", "5-base/proxy"):
        (other / link).symlink_to(root / "2-proxy/tiny-seed1", target_is_directory=True)
    (root / "2-proxy/first").symlink_to(root / "2-proxy/tiny-seed1", target_is_directory=True)
    write_method(other, "doge", ["../2-proxy/latest"])
    before = total(root)
    entries = ledger_of(merge([RunFolder.load(root), RunFolder.load(other)])).entries
    proxies = [entry for entry, cost in entries.items() if cost == PROXY]
    assert len(proxies) == 1
    seconds = sum(cost.device_seconds for cost in entries.values())
    assert seconds == pytest.approx(before + OWN.device_seconds)
