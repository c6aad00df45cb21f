"""What the networks page measures, against dense Hessians and the exact collapsed optimum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from proofread.ufm_spectra.networks import cnn, head_layers, later_layers, mlp
from proofread.ufm_spectra.optimum import collapsed_optimum
from proofread.ufm_spectra.study import (
    layer_trace,
    outliers_before_gap,
    random_features_share,
    ratio_after,
    study_layer,
    study_networks,
)

K, SIDE, N = 3, 4, 24
LOSSES = ("mse", "cross_entropy")


def network(seed: int = 0, relu_head: bool = False) -> nn.Sequential:
    return mlp(SIDE**2, K, body=(6,), head=(5, 6), relu_head=relu_head, seed=seed)


def convolutional(seed: int = 0) -> nn.Sequential:
    return cnn(SIDE, K, channels=(2, 3), strides=(1, 2), body=(5,), head=(4,), seed=seed)


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy clusters, unbalanced and in no order."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(K, (N,), generator=generator)
    noise = torch.randn(N, SIDE**2, generator=generator, dtype=torch.float64)
    return 2 * torch.eye(K, SIDE**2).double()[y] + noise, y


def loss_of(outputs: torch.Tensor, y: torch.Tensor, loss: str) -> torch.Tensor:
    if loss == "mse":
        return (outputs - F.one_hot(y, K)).square().sum() / (2 * len(y))
    return F.cross_entropy(outputs, y)


def dense_hessian(net: nn.Module, layer: str, x, y, loss: str) -> torch.Tensor:
    def of(weight: torch.Tensor) -> torch.Tensor:
        return loss_of(functional_call(net, {f"{layer}.weight": weight}, (x,)), y, loss)

    weight = net.get_parameter(f"{layer}.weight").detach()
    return torch.func.hessian(of)(weight).reshape(weight.numel(), -1).detach()


def means_around(net: nn.Sequential, layer: str, x, y) -> tuple[list, list]:
    """Class means of the layer's inputs and of the next layer's, by walking the sequence."""
    stages, h = {}, x
    for name, module in net.named_children():
        stages[name] = h
        h = module(h)
    weighted = [n for n, m in net.named_children() if isinstance(m, nn.Linear | nn.Conv2d)]
    place = weighted.index(layer)
    after = stages[weighted[place + 1]] if place + 1 < len(weighted) else h
    return tuple([z[y == c].mean(0).detach() for c in range(K)] for z in (stages[layer], after))


# --- one layer, against loops ---------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("relu_head", [False, True], ids=["linear", "relu"])
@pytest.mark.parametrize("layer", ["head1", "head2", "head3"])
def test_against_the_dense_hessian(layer, relu_head, loss):
    net, (x, y) = network(1, relu_head), data()
    found = study_layer(net, layer, x, y, loss)
    hessian = dense_hessian(net, layer, x, y, loss)
    values, vectors = (part.flip(-1) for part in torch.linalg.eigh(hessian))
    k, top = K**2, vectors[:, : K**2]
    torch.testing.assert_close(found.eigenvalues, values[: k + 1], rtol=1e-8, atol=1e-9)
    assert found.trace == pytest.approx(float(hessian.trace()), rel=1e-10)
    assert found.share == pytest.approx(float(values[:k].sum() / hessian.trace()), rel=1e-8)
    assert found.class_gap == pytest.approx(float(values[K - 1] / values[K]), rel=1e-6)
    assert found.gap == pytest.approx(float(values[k - 1] / values[k]), rel=1e-5)
    check_means(net, layer, x, y, loss, found, hessian, top)


def check_means(net, layer, x, y, loss, found, hessian, top) -> None:
    below, above = means_around(net, layer, x, y)
    products = [torch.kron(above[c], below[d]) for c in range(K) for d in range(K)]
    basis = torch.linalg.qr(torch.stack(products, 1))[0]
    assert found.overlap == pytest.approx(float((top.T @ basis).square().sum() / K**2), rel=1e-5)
    residuals = []
    for product in products:
        v = product / product.norm()
        rayleigh = v @ hessian @ v
        residuals.append(float((hessian @ v - rayleigh * v).norm() / rayleigh))
    assert found.residual_single == pytest.approx(sum(residuals) / K**2)
    weight = net.get_parameter(f"{layer}.weight")
    gradient = torch.autograd.grad(loss_of(net(x), y, loss), weight)[0].flatten()
    size = gradient.square().sum()
    share = float((top.T @ gradient).square().sum() / size)
    assert found.gradient_share == pytest.approx(share, rel=1e-5)
    for shift, name in ((0, "gradient_cosine"), (1, "gradient_mismatched")):
        d = sum(torch.kron(above[c], below[(c - shift) % K]) for c in range(K))
        cosine = float((d @ gradient) ** 2 / (d @ d) / size)
        assert getattr(found, name) == pytest.approx(cosine), name


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layer", ["conv1", "conv2", "body1", "head2"])
def test_traces_of_all_kinds_of_layers(layer, loss):
    net, (x, y) = convolutional(2), data()
    hessian = dense_hessian(net, layer, x, y, loss)
    assert layer_trace(net, layer, x, y, loss) == pytest.approx(float(hessian.trace()), rel=1e-10)


def test_a_convolution_has_a_spectrum_but_no_products_of_means():
    net, (x, y) = convolutional(2), data()
    found = study_layer(net, "conv2", x, y, other=convolutional(3))
    values = torch.linalg.eigvalsh(dense_hessian(net, "conv2", x, y, "mse")).flip(0)
    torch.testing.assert_close(found.eigenvalues, values[:10], rtol=1e-8, atol=1e-10)
    assert 0 < found.gradient_share <= 1
    missing = ("overlap", "overlap_backward", "overlap_other", "residual_single")
    for name in (*missing, "gradient_cosine", "gradient_mismatched"):
        assert math.isnan(getattr(found, name)), name


def test_weights_and_nc1():
    net, (x, y) = network(1), data()
    found = study_layer(net, "head1", x, y)
    sigma = np.linalg.svd(net.head1.weight.detach().numpy(), compute_uv=False)
    assert found.singular_values.numpy() == pytest.approx(sigma)
    assert found.weight_gap == pytest.approx(sigma[K - 1] / sigma[K])
    assert found.weight_rank == int(np.argmax(sigma[:-1] / sigma[1:])) + 1
    features = net[:2](x).detach()  # body1 and its ReLU
    means = torch.stack([features[y == c].mean(0) for c in range(K)])
    within = torch.cov((features - means[y]).T, correction=0)
    between = torch.cov(means.T, correction=0)
    nc1 = torch.trace(within @ torch.linalg.pinv(between, rtol=1e-10, hermitian=True)) / K
    assert found.nc1 == pytest.approx(float(nc1))


# --- exact collapse -------------------------------------------------------------------------------


def collapsed_network(seed: int, width: int = 12) -> tuple[nn.Sequential, torch.Tensor, float]:
    optimum = collapsed_optimum(K, 4, 3, 0.004, 0.01, width)
    layers = []
    for weight in optimum.weights(seed):
        layer = nn.Linear(*reversed(weight.shape), bias=False).double()
        layer.weight.data.copy_(weight)
        layers.append(layer)
    return nn.Sequential(*layers), optimum.features(seed).T.contiguous(), optimum.layer_outlier(1)


@pytest.mark.parametrize("layer", ["0", "1", "2"])
def test_exact_collapse(layer):
    net, features, outlier = collapsed_network(0)
    y = torch.arange(K).repeat_interleave(4)
    found = study_layer(net, layer, features, y)
    assert found.eigenvalues[: K**2].numpy() == pytest.approx(outlier, rel=1e-9)
    assert found.gap == math.inf
    ones = (found.share, found.overlap, found.overlap_backward, found.gradient_share)
    assert ones == pytest.approx((1,) * 4, abs=1e-9)
    assert found.gradient_cosine == pytest.approx(1, abs=1e-9)
    zeros = (found.residual_single, found.gradient_mismatched, found.nc1)
    assert zeros == pytest.approx((0,) * 3, abs=1e-9)
    assert found.weight_rank == K
    assert found.class_gap == pytest.approx(1)
    assert found.residual_random > 1
    assert math.isnan(found.overlap_other)


def test_another_collapsed_network_spans_something_else():
    """Random K-dimensional subspaces of R^d overlap by K/d in each factor; the last layer's outputs
    are the classes themselves, so there only the inputs count."""
    y = torch.arange(K).repeat_interleave(4)
    middle, last = [], []
    for seed in range(8):
        net, features, _ = collapsed_network(seed)
        other, _, _ = collapsed_network(seed + 100)
        assert study_layer(net, "1", features, y, other=net).overlap_other == pytest.approx(1)
        # the other network reads these features, not its own: random subspaces only after layer 1
        middle.append(study_layer(net, "1", features, y, other=other).overlap_other)
        last.append(study_layer(net, "2", features, y, other=other).overlap_other)
    assert np.mean(middle) == pytest.approx((K / 12) ** 2, abs=0.04)
    assert np.mean(last) == pytest.approx(K / 12, abs=0.1)


# --- many networks --------------------------------------------------------------------------------


def test_study_networks_is_study_layer_many_times():
    nets, (x, y) = [network(seed) for seed in range(3)], data()
    seen: list[int] = []
    study = study_networks(nets, head_layers(nets[0]), x, y, k=7, progress=seen.append)
    assert seen == [1, 2, 3]
    assert study.layers == ("head1", "head2", "head3")
    assert study.values("gap").shape == (3, 3)
    assert study.values("eigenvalues").shape == (3, 3, 8)
    for i, j in itertools.product(range(3), range(3)):
        other = nets[(i + 1) % 3]
        single = study_layer(nets[i], study.layers[j], x, y, k=7, other=other)
        for name in ("share", "overlap", "overlap_other", "residual_random", "nc1"):
            assert study.values(name)[i, j] == getattr(single, name), name
    alone = study_networks(nets[:1], ["head2"], x, y)
    assert np.isnan(alone.values("overlap_other")).all()


def test_all_later_layers_of_a_convolutional_network():
    net, (x, y) = convolutional(), data()
    study = study_networks([net], later_layers(net), x, y, "cross_entropy")
    shares = study.values("share")
    assert shares.shape == (1, 4)
    assert ((shares > 0) & (shares <= 1 + 1e-12)).all()


# --- control --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_random_features_share_is_the_dense_one(seed):
    n, k, n_in, n_out = 40, 3, 8, 7
    generator = torch.Generator().manual_seed(seed)
    backward = torch.randn(n, k, n_out, generator=generator, dtype=torch.float64)
    features = torch.randn(n, n_in, generator=generator, dtype=torch.float64)
    matrix = sum(
        torch.kron(backward[i].T @ backward[i], torch.outer(features[i], features[i]))
        for i in range(n)
    )
    values = torch.linalg.eigvalsh(matrix).flip(0)
    expected = float(values[: k * k].sum() / values.sum())
    assert random_features_share(n, k, n_in, n_out, seed=seed) == pytest.approx(expected, rel=1e-3)


def test_random_features_fill_few_dimensions_evenly():
    """Many samples: all eigenvalues are nearly equal, so that K² of n_in·n_out hold their share."""
    assert random_features_share(20_000, 2, 4, 5) == pytest.approx(4 / 20, rel=0.1)


# --- helpers and errors ---------------------------------------------------------------------------


def test_ratios_and_gaps_by_hand():
    values = torch.tensor([8.0, 4.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    assert [ratio_after(values, k) for k in (1, 2, 3, 4)] == [2, 4, 2, math.inf]
    assert math.isnan(ratio_after(values, 5))
    assert outliers_before_gap(values[:4], 2) == 2
    assert outliers_before_gap(values, 2) == 4
    assert outliers_before_gap(values, 5) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": "head9"}, "head9"),
        ({"layer": "relu1"}, "relu1"),
        ({"k": K - 1}, "k=2 must lie in 3"),
        ({"k": 30}, "k=30 must lie in 3 … 29"),
        ({"loss": "hinge"}, "loss must be"),
        ({"y": torch.full((N,), 1)}, "class"),
        ({"y": torch.arange(N - 1) % K}, "targets"),
        ({"x": torch.full((N, SIDE**2), math.nan).double()}, "NaN"),
    ],
)
def test_study_errors(change, message):
    x, y = data()
    given = {"network": network(), "layer": "head1", "x": x, "y": y} | change
    with pytest.raises((ValueError, TypeError), match=message):
        study_layer(**given)


def test_more_errors():
    x, y = data()
    curved = nn.Sequential(nn.Linear(SIDE**2, 6), nn.Tanh(), nn.Linear(6, K)).double()
    with pytest.raises(ValueError, match="piecewise linear in the weight of '0'"):
        study_layer(curved, "0", x, y)
    for networks, layers in (([], ["head1"]), ([network()], []), ([network()], "head1")):
        with pytest.raises(ValueError, match="at least one each"):
            study_networks(networks, layers, x, y)
    with pytest.raises(ValueError, match="at least n_classes²"):
        random_features_share(10, 5, 4, 4)
    with pytest.raises(ValueError, match="at least 1"):
        random_features_share(0, 1, 4, 4)
