"""Class, cross-class and within-class parts against the sums written out, and ranks at collapse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional

from proofread.ufm_spectra import decomposition
from proofread.ufm_spectra.decomposition import LowRankOperator, class_cross_within
from proofread.ufm_spectra.operators import gauss_newton
from proofread.ufm_spectra.optimum import collapsed_optimum

K, N = 3, 8
LOSSES = ("mse", "cross_entropy")
each_loss = pytest.mark.parametrize("loss", LOSSES)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, K))


def convolutional() -> nn.Module:
    """The first layer's Jacobian is written out, the second one's factored."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(3, 2, (3, 2)),
        nn.Flatten(),
        nn.Linear(4, K),
    )


MODELS = {"perceptron": perceptron, "convolutional": convolutional}


def case(name: str, n: int = N) -> tuple[nn.Module, list[str], Tensor, Tensor]:
    """A model, its layers, inputs, and classes of unequal sizes out of order."""
    torch.manual_seed(2)
    shape = (n, 4) if name == "perceptron" else (n, 1, 8, 8)
    labels = torch.tensor([2, 0, 1, 1, 2, 0, 0, 0])[:n]
    model = MODELS[name]().double()
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    return model, layers, torch.randn(shape).double(), labels


def extended_vectors(model: nn.Module, layer: str, x: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    """All ``v_ic'`` ``[N, K, P]`` and their weights ``[N, K]`` from torch.func."""
    weight = model.get_submodule(layer).weight.detach()
    outputs = model(x).detach()
    j = jacrev(lambda w: functional_call(model, {f"{layer}.weight": w}, (x,)))(weight).flatten(2)
    if loss == "mse":
        return j.detach(), torch.full(outputs.shape, 1 / len(x)).double()
    p = outputs.softmax(1)
    delta = torch.stack(
        [
            torch.stack([j[i].T @ (p[i] - torch.eye(K).double()[c]) for c in range(K)])
            for i in range(len(x))
        ]
    )
    return delta.detach(), p / len(x)


def parts_written_out(v: Tensor, w: Tensor, labels: Tensor, loss: str) -> dict[str, Tensor]:
    """The definitions as they read, in loops."""
    size = v.shape[2]
    parts = {
        name: torch.zeros(size, size).double() for name in ("same", "class_", "cross", "within")
    }
    for c in range(K):
        members = [i for i in range(len(v)) if labels[i] == c]
        others = [d for d in range(K) if loss == "mse" or d != c]
        for i in members:
            if loss != "mse":
                parts["same"] += w[i, c] * torch.outer(v[i, c], v[i, c])
        means, totals = {}, {}
        for d in others:
            totals[d] = sum(w[i, d] for i in members)
            means[d] = sum(w[i, d] * v[i, d] for i in members) / totals[d]
            for i in members:
                off = v[i, d] - means[d]
                parts["within"] += w[i, d] * torch.outer(off, off)
        total = sum(totals.values())
        mean = sum(totals[d] * means[d] for d in others) / total
        parts["class_"] += total * torch.outer(mean, mean)
        for d in others:
            parts["cross"] += totals[d] * torch.outer(means[d] - mean, means[d] - mean)
    return parts


@pytest.mark.parametrize("name", MODELS)
@each_loss
def test_parts_are_those_of_the_definition(name: str, loss: str) -> None:
    model, layers, x, labels = case(name)
    for layer in layers:
        v, w = extended_vectors(model, layer, x, loss)
        truth = parts_written_out(v, w, labels, loss)
        parts = class_cross_within(model, layer, x, labels, loss)
        assert parts._fields == (("same",) if loss != "mse" else ()) + ("class_", "cross", "within")
        for field, operator in parts._asdict().items():
            assert truth[field].abs().max() > 1e-5
            torch.testing.assert_close(operator.to_dense(), truth[field], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", MODELS)
@each_loss
@pytest.mark.parametrize("batch_size", [None, 3])
def test_parts_sum_to_the_gauss_newton_matrix(name: str, loss: str, batch_size: int | None) -> None:
    """Whatever the sizes of the classes, one without samples included; symmetric, no negatives."""
    model, layers, x, labels = case(name)
    for targets in (labels, torch.arange(N) % K, labels.clamp(max=1)):
        for layer in layers:
            parts = class_cross_within(model, layer, x, targets, loss, batch_size=batch_size)
            dense = [operator.to_dense() for operator in parts]
            truth = gauss_newton(model, x, targets, loss, layer=layer).to_dense()
            torch.testing.assert_close(sum(dense), truth, rtol=0, atol=1e-14)
            for matrix in dense:
                torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-15)
                assert torch.linalg.eigvalsh(matrix).min() > -1e-14


@pytest.mark.parametrize("name", MODELS)
@each_loss
def test_eigenvalues_by_small_grams(name: str, loss: str) -> None:
    model, layers, x, labels = case(name)
    ranks = {"class_": K, "cross": K * (K - 1) if loss == "mse" else K * (K - 2)}
    for layer in layers:
        parts = class_cross_within(model, layer, x, labels, loss)._asdict()
        for field, rank in ranks.items():
            values = parts[field].eigenvalues()
            truth = torch.linalg.eigvalsh(parts[field].to_dense()).flip(0)
            assert len(values) == parts[field].rank == min(rank, len(truth))
            torch.testing.assert_close(values, truth[: len(values)], rtol=1e-9, atol=1e-15)
            assert truth[len(values) :].abs().sum() < 1e-14


@each_loss
def test_eigenvalues_are_never_negative(loss: str) -> None:
    """Not even where a class is missing, and ranks are lower."""
    model, layers, x, labels = case("perceptron")
    for layer in layers:
        parts = class_cross_within(model, layer, x, labels.clamp(max=1), loss)
        for part in (parts.class_, parts.cross):
            values = part.eigenvalues()
            assert values.min() >= 0
            assert values[-1] < 1e-16 < values[0]
    for seed in range(20):
        torch.manual_seed(seed)
        operator = LowRankOperator(torch.randn(6, 2) @ torch.randn(2, 9), 5)
        assert operator.eigenvalues().min() >= 0


@pytest.mark.parametrize("depth", [1, 3])
def test_ranks_and_eigenvalues_at_collapse(depth: int) -> None:
    """K and K(K − 1) times λγ/(1−γ), nothing within, and orthogonal images."""
    optimum = collapsed_optimum(4, 5, depth, 0.01, 0.002, 6)
    layers = []
    for weight in optimum.weights(seed=1):
        layers.append(nn.Linear(weight.shape[1], weight.shape[0], bias=False).double())
        layers[-1].weight.data.copy_(weight)
    x, labels = optimum.features(seed=1).T.contiguous(), torch.arange(4).repeat_interleave(5)
    model = nn.Sequential(*layers)
    for layer in model:
        class_, cross, within = class_cross_within(model, layer, x, labels)
        expected = torch.full((12,), optimum.outlier, dtype=torch.float64)
        torch.testing.assert_close(class_.eigenvalues(), expected[:4], rtol=1e-11, atol=0)
        torch.testing.assert_close(cross.eigenvalues(), expected, rtol=1e-11, atol=0)
        assert within.to_dense().abs().max() < 1e-14 * optimum.outlier
        assert (class_ @ cross.to_dense()).abs().max() < 1e-13 * optimum.outlier**2


@each_loss
def test_within_is_zero_only_at_collapse(loss: str) -> None:
    """Noise within classes of inputs is noise within classes of vectors, of the second order."""
    model, layers, _, labels = case("perceptron")
    centres, noise = torch.randn(K, 4).double()[labels], torch.randn(N, 4).double()
    sizes = []
    for scale in (0.0, 1e-3, 1e-2):
        within = class_cross_within(model, layers[0], centres + scale * noise, labels, loss).within
        sizes.append(float(within.to_dense().trace()))
    assert sizes[0] < 1e-15
    assert sizes[2] / sizes[1] == pytest.approx(100, rel=0.05)


def test_confident_predictions_do_not_divide_by_zero() -> None:
    """Probabilities that underflow to 0 leave vectors of no weight, not NaN."""
    model, layers, x, labels = case("perceptron")
    with torch.no_grad():
        model[4].weight.mul_(1e5)
    model, x = model.float(), x.float()
    parts = class_cross_within(model, layers[2], x, labels, "cross_entropy")
    truth = gauss_newton(model, x, labels, "cross_entropy", layer=layers[2]).to_dense()
    total = sum(operator.to_dense() for operator in parts)
    assert truth.isfinite().all()
    torch.testing.assert_close(total, truth, rtol=1e-4, atol=1e-6)


@each_loss
def test_single_precision_and_one_hot_targets(loss: str) -> None:
    model, layers, x, labels = case("convolutional")
    exact = class_cross_within(model, layers[1], x, labels, loss)
    hot = functional.one_hot(labels, K).double()
    for a, b in zip(exact, class_cross_within(model, layers[1], x, hot, loss), strict=True):
        torch.testing.assert_close(a.to_dense(), b.to_dense())
    single = class_cross_within(model.float(), layers[1], x.float(), labels, loss)
    for a, b in zip(exact, single, strict=True):
        assert b.dtype == torch.float32
        torch.testing.assert_close(b.to_dense().double(), a.to_dense(), rtol=1e-4, atol=1e-6)


def test_blocks_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model, layers, x, labels = case("convolutional")
    before = [part.to_dense() for part in class_cross_within(model, layers[1], x, labels)]
    monkeypatch.setattr("proofread.ufm_spectra.operators.BLOCK_BYTES", 1)
    for part, dense in zip(class_cross_within(model, layers[1], x, labels), before, strict=True):
        assert part.applications == 0
        torch.testing.assert_close(part.to_dense(), dense)
        assert part.applications == len(dense)


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model, layers, x, labels = case("perceptron")
    with pytest.raises(ValueError, match="loss must be one of mse, cross_entropy, got 'hinge'"):
        class_cross_within(model, layers[0], x, labels, "hinge")
    with pytest.raises(ValueError, match="loss must be one of"):
        class_cross_within(model, layers[0], x, labels, functional.cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must name one class a sample"):
        class_cross_within(model, layers[0], x, torch.full((N, K), 1 / K).double())
    with pytest.raises(ValueError, match="targets must be in 0…2"):
        class_cross_within(model, layers[0], x, labels - 1)
    with pytest.raises(ValueError, match="'9' is not in the model"):
        class_cross_within(model, "9", x, labels)
    layer = nn.Linear(4, 4).double()
    twice = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, K).double())
    with pytest.raises(ValueError, match="used 2 times"):
        class_cross_within(twice, "0", x, labels)
    monkeypatch.setattr(decomposition, "MEMORY_LIMIT", 100)
    with pytest.raises(ValueError, match="class means of this layer would take"):
        class_cross_within(model, layers[0], x, labels)
