"""What the compiler makes of megatron's layers; the graphs run eagerly, as there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from megatron_chameleon.errors import UserError
from megatron_chameleon.model import compiled_layers
from megatron_chameleon.model.compiled_layers import check_compile, compile_layers
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.model.sizes import ModelShape, ModelSize
from megatron_chameleon.options.parallel import TrainingParallelOptions

SHAPE = ModelShape(ModelSize(3, 2, 32, 64), vocab_size=100, max_sequence_length=16)


@pytest.fixture
def _compiler():
    """Compiling is off on the CPU, where nothing compiles but this."""
    torch._dynamo.reset()
    torch.compiler.set_stance("default")
    yield
    torch.compiler.set_stance("force_eager")
    torch._dynamo.reset()


def losses_and_gradients(model):
    tokens = torch.randint(100, (2, 17), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(16).expand(2, 16)
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous())
    losses.mean().backward()
    return [losses.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.usefixtures("_compiler")
def test_layers_are_one_graph_that_all_share_and_nothing_changes(one_rank):
    plain, compiled = (build_model(SHAPE, one_rank, seed=1) for _ in range(2))
    graphs = CompileCounterWithBackend("aot_eager")
    compile_layers(compiled, backend=graphs)
    expected = losses_and_gradients(plain)
    assert graphs.frame_count == 0
    for mine, right in zip(losses_and_gradients(compiled), expected, strict=True):
        assert torch.equal(mine, right)
    assert graphs.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert not torch._dynamo.utils.counters["recompiles"]


@pytest.mark.usefixtures("_compiler")
def test_a_compiled_model_saves_the_same_state(one_rank):
    plain, compiled = (build_model(SHAPE, one_rank, seed=1) for _ in range(2))
    compile_layers(compiled, backend="eager")
    assert compiled.state_dict().keys() == plain.state_dict().keys()


def test_without_a_gpu_compiling_is_refused():
    with pytest.raises(UserError, match="--compile-layers needs a CUDA device"):
        check_compile(TrainingParallelOptions())


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compiled_layers, "triton_problem", lambda: None)
    check_compile(TrainingParallelOptions())
    with pytest.raises(UserError, match="leave out one of them"):
        check_compile(TrainingParallelOptions(overlap_param_gather=True))
    monkeypatch.setattr(compiled_layers, "triton_problem", lambda: "Triton needs gcc")
    with pytest.raises(UserError, match="Triton needs gcc"):
        check_compile(TrainingParallelOptions())
