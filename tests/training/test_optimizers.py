"""The optimizers: AdamW's groups and clipping are in training/test_trainer.py, Muon is here."""

from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.training_helpers import Phase, assert_resumes
from torch import nn

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.search import search
from parnas.training.checkpoints import list_checkpoints, load_state
from parnas.training.optimizers import Muon, check_shapes, gradient_norm, orthogonalise, step_clipped, suits_muon
from parnas.training.retrain import retrain

SHAPES = [(6, 6), (4, 10), (10, 4), (6, 6)]


def make_matrices() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


def set_gradients(matrices: list[nn.Parameter], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for matrix in matrices:
        matrix.grad = torch.randn(matrix.shape, generator=draw)


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5)])
def test_orthogonalised_matrices_keep_their_singular_vectors(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    inner = left.mT @ orthogonalise(matrices) @ right.mT
    values = inner.diagonal(dim1=1, dim2=2)
    assert torch.allclose(inner, torch.diag_embed(values), atol=1e-4)
    assert values.min() > 0.3  # the smallest ones have not got as far
    assert values.max() < 1.3


def test_muon_is_its_slow_twin() -> None:
    ours, theirs = make_matrices(), make_matrices()
    optimizer, momenta = Muon(ours, 0.1, 0.2), [torch.zeros(shape) for shape in SHAPES]
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        for matrix, momentum in zip(theirs, momenta, strict=True):
            assert matrix.grad is not None
            momentum.mul_(0.95).add_(0.05 * matrix.grad)
            x = 0.05 * matrix.grad + 0.95 * momentum
            x = x / x.norm()
            for _ in range(5):
                square = x @ x.T
                x = 3.4445 * x - 4.775 * square @ x + 2.0315 * square @ square @ x
            matrix.data = matrix.data * (1 - 0.1 * 0.2) - 0.1 * 0.2 * max(matrix.shape) ** 0.5 * x
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)


def test_clipping_bounds_what_one_gradient_has_of_the_momentum() -> None:
    clipped, scaled = make_matrices(), make_matrices()
    optimizers = [Muon(matrices, 0.1, 0.1) for matrices in (clipped, scaled)]
    for step, size in enumerate((0.01, 1000.0, 0.01)):
        for matrices in (clipped, scaled):
            set_gradients(matrices, step)
            for matrix in matrices:
                assert matrix.grad is not None
                matrix.grad *= size
        norm = gradient_norm(clipped)
        step_clipped(optimizers[0], norm, 1.0)
        torch.nn.utils.clip_grads_with_norm_(scaled, 1.0, norm)
        optimizers[1].step()
    for mine, expected in zip(clipped, scaled, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)


def test_muon_moves_weights_as_far_as_adamw_does() -> None:
    matrix = nn.Parameter(torch.zeros(64, 256))
    set_gradients([matrix], 1)
    Muon([matrix], 0.5, 0.0).step()
    assert matrix.pow(2).mean().sqrt().item() == pytest.approx(0.5 * 0.2, rel=0.2)


def test_muon_leaves_matrices_without_gradient_as_they_are() -> None:
    matrices = make_matrices()
    before = [matrix.detach().clone() for matrix in matrices]
    optimizer = Muon(matrices, 0.1, 0.1)
    set_gradients(matrices[:1], 1)
    optimizer.step()
    assert not torch.equal(matrices[0], before[0])
    assert all(torch.equal(now, then) for now, then in zip(matrices[1:], before[1:], strict=True))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_muon_takes_no_step_by_a_gradient_that_is_not_finite(wrong: float) -> None:
    matrices = make_matrices()
    optimizer = Muon(matrices, 0.1, 0.1)
    set_gradients(matrices, 1)
    step_clipped(optimizer, gradient_norm(matrices), 1.0, skip_non_finite=True)
    before = [matrix.detach().clone() for matrix in matrices]
    set_gradients(matrices, 2)
    assert matrices[0].grad is not None
    matrices[0].grad[0, 0] = wrong
    step_clipped(optimizer, gradient_norm(matrices), 1.0, skip_non_finite=True)
    assert all(torch.equal(now, then) for now, then in zip(matrices, before, strict=True))
    set_gradients(matrices, 3)
    step_clipped(optimizer, gradient_norm(matrices), 1.0, skip_non_finite=True)
    assert all(bool(matrix.isfinite().all()) for matrix in matrices)
    assert not torch.equal(matrices[0], before[0])


def test_muon_is_for_the_matrices_of_layers_alone() -> None:
    network = TransformerXL.build(Config(model={"share_biases": False}).model, Architecture("sf"), 40)
    taken = {name for name, weight in network.named_parameters() if suits_muon(name, weight)}
    of_attention = {f"blocks.0.{name}.weight" for name in ("query", "key_value", "position", "output")}
    assert taken == of_attention | {"blocks.1.inner.weight", "blocks.1.outer.weight"}


def test_a_momentum_of_another_shape_is_refused() -> None:
    matrices = make_matrices()
    optimizer = Muon(matrices, 0.1, 0.1)
    set_gradients(matrices, 1)
    optimizer.step()
    check_shapes(optimizer)
    optimizer.state[matrices[0]]["momentum"] = torch.zeros(2)
    with pytest.raises(ValueError, match="momentum"):
        check_shapes(optimizer)


@pytest.mark.parametrize("phase", [search, retrain])
def test_training_by_muon_goes_on_exactly(phase: Phase, corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", train__optimizer="muon", search__estimator="gdas")
    whole = assert_resumes(phase, config, tmp_path, 18)
    assert load_state(list_checkpoints(whole.checkpoints)[-1])["task"]["weight_optimizer"]["muon"]["state"]
