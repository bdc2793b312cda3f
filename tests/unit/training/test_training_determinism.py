from __future__ import annotations

import os

import pytest
import torch

from megatron_chameleon.training.trainer import deterministic_algorithms


def test_only_deterministic_algorithms_run_within_the_block(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["NCCL_ALGO"] == "Ring"
        assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "1"  # the user's own choice
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_users_choice_of_an_algorithm_stays(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    with deterministic_algorithms(True):
        assert os.environ["NCCL_ALGO"] == "Tree"
        assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"


def test_the_setting_is_as_it_was_after_a_failure():
    with pytest.raises(ZeroDivisionError), deterministic_algorithms(True):
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()


def test_without_the_option_nothing_is_set(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
