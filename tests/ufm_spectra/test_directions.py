"""Predicted eigenvectors against naive class means, eigenvectors at collapse, and ReLU networks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from proofread.ufm_spectra.directions import (
    backward_directions,
    class_means,
    collapse_directions,
)
from proofread.ufm_spectra.operators import gauss_newton, layer_hessian
from proofread.ufm_spectra.optimum import collapsed_optimum

K = 3


def linear_collapse(
    depth: int = 3, width: int = 5, n: int = 4
) -> tuple[nn.Module, Tensor, Tensor, float]:
    """A collapsed linear network with its inputs, labels and outlier, in float64."""
    optimum = collapsed_optimum(K, n, depth, 0.01, 0.002, width)
    layers = []
    for weight in optimum.weights(seed=3):
        layers.append(nn.Linear(weight.shape[1], weight.shape[0], bias=False).double())
        layers[-1].weight.data.copy_(weight)
    labels = torch.arange(K).repeat_interleave(n)
    return nn.Sequential(*layers), optimum.features(seed=3).T.contiguous(), labels, optimum.outlier


def relu_collapse(seed: int = 3) -> tuple[nn.Module, Tensor, Tensor]:
    """A ReLU network with collapsed inputs; of this seed no class has fewer than K units open."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, K)
    ).double()
    labels = torch.arange(12) % K
    return model, torch.randn(K, 6).double()[labels], labels


def any_data(n: int = 11) -> tuple[nn.Module, Tensor, Tensor]:
    """A ReLU network on noise, classes of unequal sizes out of order."""
    model, _, _ = relu_collapse(5)
    labels = torch.tensor([2, 0, 1, 1, 2, 0, 0, 0, 1, 2, 0])[:n]
    return model, torch.randn(n, 6).double(), labels


def same_span(a: Tensor, b: Tensor) -> float:
    """Largest distance between the projectors on two spans."""
    first, second = torch.linalg.qr(a)[0], torch.linalg.qr(b)[0]
    return float((first @ first.T - second @ second.T).abs().max())


# --- class means ----------------------------------------------------------------------------------


def test_columns_are_products_of_class_means() -> None:
    """Each column, entry by entry, for each layer: before the next layer is after the ReLU."""
    model, x, labels = any_data()
    after = {"0": model[:2](x), "2": model[:4](x), "4": model(x)}
    before = {"0": x, "2": model[:2](x), "4": model[:4](x)}
    for layer in ("0", "2", "4"):
        columns = collapse_directions(model, layer, x, labels, orthonormal=False)
        assert columns.shape == (model.get_submodule(layer).weight.numel(), K * K)
        assert not columns.requires_grad
        for c, d in itertools.product(range(K), repeat=2):
            out, inner = after[layer][labels == c].mean(0), before[layer][labels == d].mean(0)
            expected = torch.kron(out, inner)
            torch.testing.assert_close(columns[:, c * K + d], expected.detach())


def test_backward_columns_are_products_of_means() -> None:
    model, x, labels = any_data()
    z = model[:3](x).detach().requires_grad_()
    outputs = model[3:](z)
    derivative = [
        torch.autograd.grad(outputs[:, k].sum(), z, retain_graph=True)[0] for k in range(K)
    ]
    columns = backward_directions(model, "2", x, labels, orthonormal=False)
    for c, d in itertools.product(range(K), repeat=2):
        inner = model[:2](x)[labels == c].mean(0)
        expected = torch.kron(derivative[d][labels == c].mean(0), inner)
        torch.testing.assert_close(columns[:, c * K + d], expected.detach())


def test_class_means() -> None:
    values = torch.randn(5, 2, 3)
    labels = torch.tensor([1, 0, 1, 1, 0])
    expected = torch.stack([values[[1, 4]].mean(0), values[[0, 2, 3]].mean(0)])
    torch.testing.assert_close(class_means(values, labels, 2), expected)


@pytest.mark.parametrize("function", [collapse_directions, backward_directions])
def test_orthonormal_columns_are_those_of_qr(function) -> None:
    model, x, labels = any_data()
    raw = function(model, "2", x, labels, orthonormal=False)
    columns = function(model, "2", x, labels)
    torch.testing.assert_close(columns.T @ columns, torch.eye(K * K).double(), atol=1e-12, rtol=0)
    triangular = columns.T @ raw
    assert triangular.tril(-1).abs().max() < 1e-12 * raw.abs().max() * len(raw)
    assert (triangular.diagonal() > 0).all()
    assert same_span(raw, columns) < 1e-12


@pytest.mark.parametrize("function", [collapse_directions, backward_directions])
def test_targets_order_and_precision(function) -> None:
    model, x, labels = any_data()
    columns = function(model, "2", x, labels)
    hot = functional.one_hot(labels, K).double()
    torch.testing.assert_close(function(model, model[2], x, hot), columns)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(function(model, "2", x[order], labels[order]), columns)
    with torch.inference_mode():
        torch.testing.assert_close(function(model, "2", x, labels), columns)
    single = function(model.float(), "2", x.float(), labels)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), columns, rtol=0, atol=1e-4)


# --- eigenvectors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("function", [collapse_directions, backward_directions])
def test_eigenvectors_of_the_linear_model(depth: int, function) -> None:
    """The K² columns are eigenvectors with the closed form λγ/(1−γ), and nothing else is left."""
    model, x, labels, outlier = linear_collapse(depth)
    for layer in model:
        h = layer_hessian(model, layer, x, labels)
        columns = function(model, layer, x, labels)
        assert ((h @ columns) - outlier * columns).abs().max() < 1e-11 * outlier
        rest = h.to_dense() - outlier * columns @ columns.T
        assert rest.abs().max() < 1e-11 * outlier
        raw = function(model, layer, x, labels, orthonormal=False)  # orthogonal by themselves
        gram = raw.T @ raw
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-11 * gram.max()


def test_backward_directions_span_the_range_in_relu_networks() -> None:
    """For collapsed features; the products of class means do not."""
    model, x, labels = relu_collapse()
    for layer in ("0", "2", "4"):
        g = gauss_newton(model, x, labels, layer=layer).to_dense()
        columns = backward_directions(model, layer, x, labels)
        assert (g - columns @ (columns.T @ g)).abs().max() < 1e-13
        assert torch.linalg.matrix_rank(g) == K * K
        means = collapse_directions(model, layer, x, labels)
        if layer != "4":
            assert same_span(means, columns) > 0.1


def test_sum_of_backward_directions_is_the_gauss_newton_matrix() -> None:
    model, x, labels = relu_collapse()
    columns = backward_directions(model, "2", x, labels, orthonormal=False)
    g = gauss_newton(model, x, labels, layer="2").to_dense()
    torch.testing.assert_close(columns @ columns.T / K, g)


# --- deficient spans ------------------------------------------------------------------------------


def test_centred_class_means_are_dependent() -> None:
    """Rank K − 1 before, K after: K(K − 1) directions."""
    model, x, labels = any_data()
    x = x - class_means(x, labels, K).mean(0)
    with pytest.raises(ValueError, match="3 class means before the layer span 2 dimensions only"):
        collapse_directions(model, "0", x, labels)
    without = x * (labels != 0)[:, None]
    with pytest.raises(ValueError, match="9 backward directions span 6 dimensions only"):
        backward_directions(model, "0", without, labels)
    basis = collapse_directions(model, "0", x, labels, allow_deficient=True)
    assert basis.shape == (48, K * (K - 1))
    torch.testing.assert_close(basis.T @ basis, torch.eye(6).double(), rtol=0, atol=1e-12)
    raw = collapse_directions(model, "0", x, labels, orthonormal=False)
    assert (raw - basis @ (basis.T @ raw)).abs().max() < 1e-12


def test_fewer_dimensions_than_classes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, K)).double()
    x, labels = torch.randn(9, 2).double(), torch.arange(9) % K
    with pytest.raises(ValueError, match="span 2 dimensions only"):
        collapse_directions(model, "0", x, labels)
    for function in (collapse_directions, backward_directions):
        basis = function(model, "0", x, labels, allow_deficient=True)
        torch.testing.assert_close(basis.T @ basis, torch.eye(4).double(), rtol=0, atol=1e-12)


def test_means_of_very_different_sizes_are_independent() -> None:
    """The rank is that of directions, not of lengths."""
    _, x, labels = relu_collapse()
    x = x * torch.tensor([1.0, 1e-20, 1e9])[labels][:, None]
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, K)).double()
    for function in (collapse_directions, backward_directions):
        assert function(model, "0", x, labels).shape == (48, K * K)


def test_nothing_at_all() -> None:
    model, x, labels = any_data()
    assert collapse_directions(model, "0", 0 * x, labels, allow_deficient=True).shape == (48, 0)
    assert backward_directions(model, "0", 0 * x, labels, allow_deficient=True).shape == (48, 0)


# --- networks of other shapes ---------------------------------------------------------------------


class Branches(nn.Module):
    """A normalisation and a skip connection between two layers, executed in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.norm = nn.Linear(6, K), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.norm(self.first(x)))


def test_next_layer_is_next_in_execution() -> None:
    torch.manual_seed(0)
    model, (_, x, labels) = Branches().double(), any_data()
    columns = collapse_directions(model, "first", x, labels, orthonormal=False)
    after = x + model.norm(model.first(x))
    expected = torch.kron(after[labels == 0].mean(0), x[labels == 2].mean(0))
    torch.testing.assert_close(columns[:, 2], expected.detach())


def test_head_of_a_convolutional_network() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 8),
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, K, 2),
        nn.Flatten(),
    ).double()
    x, labels = torch.randn(9, 1, 4, 4).double(), torch.arange(9) % K
    columns = collapse_directions(model, "3", x, labels, orthonormal=False)
    read, after = model[:3](x), model[:4](x)
    expected = torch.kron(after[labels == 1].mean(0), read[labels == 0].mean(0))
    torch.testing.assert_close(columns[:, 3], expected.detach())
    for function in (collapse_directions, backward_directions):
        with pytest.raises(ValueError, match="'0' is a convolution: directions need a Linear"):
            function(model, "0", x, labels)


def test_next_layer_that_reads_something_else() -> None:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Unflatten(1, (1, 8)), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(4, K)
    ).double()
    _, x, labels = any_data()
    with pytest.raises(
        ValueError, match=r"returns 8 numbers a sample, but the next one reads \[11, 4\]"
    ):
        collapse_directions(model, "0", x, labels)
    assert backward_directions(model, "0", x, labels, allow_deficient=True).shape[0] == 48


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [collapse_directions, backward_directions])
def test_bad_input(function) -> None:
    model, x, labels = any_data()
    with pytest.raises(ValueError, match="no sample of class 2: it has no mean"):
        function(model, "0", x, labels.clamp(max=1))
    with pytest.raises(ValueError, match="must name one class a sample"):
        function(model, "0", x, torch.full((11, K), 1 / K).double())
    with pytest.raises(ValueError, match="targets must be in 0…2"):
        function(model, "0", x, labels + 1)
    with pytest.raises(ValueError, match="inputs hold NaN"):
        function(model, "0", x * torch.nan, labels)
    with pytest.raises(ValueError, match="is not in the model"):
        function(model, nn.Linear(6, 8), x, labels)
    with pytest.raises(ValueError, match="is a ReLU"):
        function(model, "1", x, labels)
    twice = nn.Sequential(
        layer := nn.Linear(6, 6).double(), nn.ReLU(), layer, nn.Linear(6, K).double()
    )
    with pytest.raises(ValueError, match="used 2 times"):
        function(twice, "0", x, labels)
    tokens = nn.Sequential(nn.Linear(3, 2), nn.Flatten(), nn.Linear(4, K)).double()
    with pytest.raises(ValueError, match=r"reads \[11, 2, 3\], not"):
        function(tokens, "0", x.view(-1, 2, 3), labels)
