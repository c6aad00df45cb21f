"""Curvature operators against dense Hessians and Jacobians of torch.func, and curvlinops."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from curvlinops import GGNLinearOperator, HessianLinearOperator
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.func import hessian as dense_hessian
from torch.nn import functional

from proofread.ufm_spectra import operators
from proofread.ufm_spectra.operators import (
    CurvatureOperator,
    DenseJacobian,
    FactoredJacobian,
    Problem,
    find_layer,
    gauss_newton,
    hessian,
    layer_hessian,
    layer_jacobian,
)

K, N = 3, 7
LOSSES = ("mse", "cross_entropy")
each_loss = pytest.mark.parametrize("loss", LOSSES)


class Residual(nn.Module):
    """One hidden layer around which the features also go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, K)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + functional.silu(self.middle(x)))


class Twice(nn.Module):
    """The same layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.relu(self.layer(x))))


class Spare(nn.Module):
    """A layer that takes part in nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare = perceptron(nn.ReLU), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Hidden(nn.Module):
    """A layer whose weight is used a second time, out of a hook's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.linear(self.layer(x), self.layer.weight))


def perceptron(activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 4), activation(), nn.Linear(4, 4), activation(), nn.Linear(4, K)
    )


def convolutional() -> nn.Module:
    """Two convolutions, the first with more positions than outputs, the second with fewer."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 2, (1, 2), bias=False),
        nn.Flatten(),
        nn.Linear(4, K),
    )
    model[1].running_mean.uniform_(-0.2, 0.2)
    model[1].running_var.uniform_(0.5, 2)
    return model.eval()


def smooth_convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 2, dilation=2), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(18, K)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: perceptron(nn.Identity),
    "relu": lambda: perceptron(nn.ReLU),
    "tanh": lambda: perceptron(nn.Tanh),
    "residual": Residual,
    "twice": Twice,
    "hidden": Hidden,
    "spare": Spare,
    "convolutional": convolutional,
    "smooth convolutional": smooth_convolutional,
}
each_model = pytest.mark.parametrize("name", [name for name in MODELS if name != "spare"])
PIECEWISE_LINEAR = ("linear", "relu", "convolutional")


def case(
    name: str, dtype: torch.dtype = torch.float64, n: int = N
) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, inputs and classes."""
    torch.manual_seed(7)
    model = MODELS[name]().to(dtype)
    shape = (n, 1, 8, 8) if "convolutional" in name else (n, 5)
    return model, torch.randn(shape, dtype=dtype), torch.arange(n) % K


def from_flat(
    model: nn.Module, names: list[str], x: Tensor
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Outputs as a function of the flattened parameters of these names, and their values."""
    values = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(flat: Tensor) -> Tensor:
        parts = flat.split([values[name].numel() for name in names])
        new = {name: part.view_as(values[name]) for name, part in zip(names, parts, strict=True)}
        return functional_call(model, {**values, **new}, (x.clone(),))

    return outputs, torch.cat([values[name].flatten() for name in names])


def loss_of(outputs: Tensor, y: Tensor, loss: str) -> Tensor:
    if loss == "cross_entropy":
        return functional.cross_entropy(outputs, y)
    return (outputs - functional.one_hot(y, K)).square().sum() / (2 * len(y))


def true_hessian(model: nn.Module, names: list[str], x: Tensor, y: Tensor, loss: str) -> Tensor:
    outputs, flat = from_flat(model, names, x)
    return dense_hessian(lambda w: loss_of(outputs(w), y, loss))(flat)


def true_gauss_newton(
    model: nn.Module, names: list[str], x: Tensor, y: Tensor, loss: str
) -> Tensor:
    """``Jᵀ (∂²loss/∂f²) J`` with everything written out."""
    outputs, flat = from_flat(model, names, x)
    jacobian = jacrev(outputs)(flat).flatten(0, 1)  # [N·K, P]
    at = outputs(flat)
    inner = dense_hessian(lambda f: loss_of(f.view_as(at), y, loss))(at.flatten())
    return jacobian.T @ inner @ jacobian


def weights(model: nn.Module) -> list[str]:
    """Dotted names of linear and convolutional layers."""
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]


def all_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


# --- values ---------------------------------------------------------------------------------------


@each_model
@each_loss
@pytest.mark.parametrize("batch_size", [None, 3])
def test_hessian_of_all_parameters(name: str, loss: str, batch_size: int | None) -> None:
    model, x, y = case(name)
    truth = true_hessian(model, all_names(model), x, y, loss)
    operator = hessian(model, x, y, loss, batch_size=batch_size)
    assert operator.shape == truth.shape
    torch.testing.assert_close(operator.to_dense(), truth, rtol=0, atol=1e-13)
    assert truth.abs().max() > 1e-2


@each_model
@each_loss
@pytest.mark.parametrize("method", ["auto", "autograd"])
def test_layer_hessian(name: str, loss: str, method: str) -> None:
    model, x, y = case(name)
    for layer in weights(model):
        truth = true_hessian(model, [f"{layer}.weight"], x, y, loss)
        operator = layer_hessian(model, layer, x, y, loss, method=method)
        assert truth.abs().max() > 1e-3
        torch.testing.assert_close(operator.to_dense(), truth, rtol=0, atol=1e-13)
        last = layer == weights(model)[-1]
        factors = method == "auto" and (name in PIECEWISE_LINEAR or last)
        assert operator.method == ("factored" if factors else "autograd")


@each_model
@each_loss
@pytest.mark.parametrize("batch_size", [None, 3])
def test_gauss_newton_of_a_layer(name: str, loss: str, batch_size: int | None) -> None:
    model, x, y = case(name)
    for layer in weights(model):
        truth = true_gauss_newton(model, [f"{layer}.weight"], x, y, loss)
        module = model.get_submodule(layer)
        operator = gauss_newton(model, x, y, loss, layer=module, batch_size=batch_size)
        torch.testing.assert_close(operator.to_dense(), truth, rtol=0, atol=1e-13)
        shared = name in ("twice", "hidden") and layer == "layer"
        assert operator.method == ("autograd" if shared else "factored")


@each_model
@each_loss
def test_gauss_newton_of_all_parameters(name: str, loss: str) -> None:
    model, x, y = case(name)
    truth = true_gauss_newton(model, all_names(model), x, y, loss)
    for batch_size in (None, 3):
        dense = gauss_newton(model, x, y, loss, batch_size=batch_size).to_dense()
        torch.testing.assert_close(dense, truth, rtol=0, atol=1e-13)


@each_loss
def test_factored_method_is_the_gauss_newton_matrix(loss: str) -> None:
    """Of a tanh network, where it is not the Hessian."""
    model, x, y = case("tanh")
    operator = layer_hessian(model, "0", x, y, loss, method="factored")
    assert operator.method == "factored"
    truth = true_gauss_newton(model, ["0.weight"], x, y, loss)
    torch.testing.assert_close(operator.to_dense(), truth, rtol=0, atol=1e-14)
    difference = operator.to_dense() - true_hessian(model, ["0.weight"], x, y, loss)
    assert difference.abs().max() > 1e-3


@pytest.mark.parametrize("padding_mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("padding", [0, (1, 2), "same"])
@pytest.mark.parametrize("dilation", [1, (2, 1)])
def test_convolutions_of_every_kind(
    padding_mode: str, padding: int | str | tuple[int, int], dilation: int | tuple[int, int]
) -> None:
    torch.manual_seed(1)
    layer = nn.Conv2d(2, 3, (2, 3), padding=padding, padding_mode=padding_mode, dilation=dilation)
    model = nn.Sequential(layer, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, K))
    model, x, y = model.double(), torch.randn(N, 2, 6, 7).double(), torch.arange(N) % K
    v = torch.randn(36, 2).double()
    fast = layer_hessian(model, layer, x, y, method="factored") @ v
    slow = layer_hessian(model, layer, x, y, method="autograd") @ v
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-13)


@each_loss
def test_convolution_written_out_or_factored(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both representations occur and agree, in blocks of one sample as well."""
    model, x, y = case("convolutional")
    problem = Problem(model, x, y, loss, None)
    kinds = [type(layer_jacobian(problem, find_layer(model, name))) for name in ("0", "4")]
    assert kinds == [DenseJacobian, FactoredJacobian]
    p = problem.probabilities() if loss == "cross_entropy" else None
    with monkeypatch.context() as patch:
        patch.setattr(operators, "BLOCK_BYTES", 1)
        for name in ("0", "4"):
            jacobian = layer_jacobian(problem, find_layer(model, name))
            eye = torch.eye(jacobian.size, dtype=torch.float64)
            truth = true_gauss_newton(model, [f"{name}.weight"], x, y, loss)
            torch.testing.assert_close(jacobian.product(eye, p), truth, rtol=0, atol=1e-13)
            if isinstance(jacobian, FactoredJacobian):
                again = jacobian.written_out().product(eye, p)
                torch.testing.assert_close(again, truth, rtol=0, atol=1e-13)


# Not the residual network: curvlinops needs forward derivatives, and SiLU has no second one.
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("residual", "spare")])
@each_loss
def test_against_curvlinops(name: str, loss: str) -> None:
    model, x, y = case(name)
    module, data, scale = nn.CrossEntropyLoss(), [(x[:4], y[:4]), (x[4:], y[4:])], 1.0
    if loss == "mse":  # their mean is over entries
        hot = functional.one_hot(y, K).double()
        module, data, scale = nn.MSELoss(), [(x[:4], hot[:4]), (x[4:], hot[4:])], K / 2
    parameters = list(model.parameters())
    v = torch.randn(sum(p.numel() for p in parameters), 3, dtype=torch.float64)
    for peer, ours in ((HessianLinearOperator, hessian), (GGNLinearOperator, gauss_newton)):
        theirs = scale * (peer(model, module, parameters, data) @ v)
        torch.testing.assert_close(ours(model, x, y, loss) @ v, theirs, rtol=0, atol=1e-12)


def test_callable_loss() -> None:
    """Mean of fourth powers, weighted by batch sizes; the targets are passed on."""

    def quartic(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets[:, 0]).pow(4).mean()

    model, x, _ = case("tanh")
    targets = torch.randn(N, 1, dtype=torch.float64)
    outputs, flat = from_flat(model, ["2.weight"], x)
    truth = dense_hessian(lambda w: quartic(outputs(w), targets))(flat)
    for batch_size in (None, 2):
        operator = layer_hessian(model, "2", x, targets, quartic, batch_size=batch_size)
        torch.testing.assert_close(operator.to_dense(), truth, rtol=1e-10, atol=1e-12)
    selected = hessian(model, x, targets, quartic, parameters=["2.weight"]).to_dense()
    torch.testing.assert_close(selected, truth, rtol=1e-10, atol=1e-12)


@each_loss
def test_floating_targets(loss: str) -> None:
    model, x, y = case("relu")
    hot = functional.one_hot(y, K).double()
    a = layer_hessian(model, "2", x, hot, loss).to_dense()
    torch.testing.assert_close(a, layer_hessian(model, "2", x, y, loss).to_dense())
    soft = 0.7 * hot + 0.1  # for the Hessian of a piecewise linear network they do not matter
    torch.testing.assert_close(layer_hessian(model, "2", x, soft, loss).to_dense(), a)
    with_int32 = layer_hessian(model, "2", x, y.int(), loss).to_dense()
    torch.testing.assert_close(with_int32, a, rtol=0, atol=0)


def test_parameters_by_name_keep_the_models_order() -> None:
    model, x, y = case("tanh")
    names = ["0.bias", "4.weight"]
    operator = hessian(model, x, y, parameters=names[::-1])
    torch.testing.assert_close(operator.to_dense(), true_hessian(model, names, x, y, "mse"))


def test_parameters_that_are_not_reached_have_zero_rows() -> None:
    model, x, y = case("spare")
    dense = hessian(model, x, y).to_dense()
    assert dense[-6:].abs().max() == 0
    assert dense[:, -6:].abs().max() == 0
    assert gauss_newton(model, x, y).to_dense()[-6:].abs().max() == 0


def test_loss_that_is_linear_in_the_parameters() -> None:
    """A gradient without a graph of its own: the Hessian is zero."""
    model = nn.Linear(5, K).double()
    x = torch.randn(N, 5).double()
    operator = hessian(model, x, x, lambda outputs, _: outputs.mean())
    assert operator.to_dense().abs().max() == 0


# --- the operator ---------------------------------------------------------------------------------


def any_operators() -> Iterator[CurvatureOperator]:
    for name in ("relu", "tanh", "convolutional"):
        model, x, y = case(name)
        yield layer_hessian(model, weights(model)[0], x, y, "cross_entropy")
        yield hessian(model, x, y, batch_size=4)
        yield gauss_newton(model, x, y, "cross_entropy")


def test_products_are_linear_and_symmetric() -> None:
    for operator in any_operators():
        p = operator.shape[0]
        u, v, w = torch.randn(3, p, dtype=torch.float64)
        torch.testing.assert_close(operator @ (2 * u - v), 2 * (operator @ u) - operator @ v)
        assert float(w @ (operator @ u)) == pytest.approx(float(u @ (operator @ w)), abs=1e-12)


def test_columns_strides_and_count() -> None:
    for operator in any_operators():
        p = operator.shape[0]
        wide = torch.randn(6, 2 * p, dtype=torch.float64).T[::2]  # [P, 6], no unit stride
        together = operator @ wide
        assert operator.applications == 6
        apart = torch.stack([operator.matvec(column) for column in wide.T], 1)
        assert operator.applications == 12
        torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-13)
        assert operator.matmat(wide[:, :0]).shape == (p, 0)
        assert operator.applications == 12
        assert not together.requires_grad
        assert not operator.matvec(wide[:, 0].clone().requires_grad_()).requires_grad
        operator.to_dense()
        assert operator.applications == 13 + p


@pytest.mark.parametrize("name", ["tanh", "relu"])
def test_columns_one_by_one_and_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop, which larger networks take, gives what the batched pass gives."""
    model, x, y = case(name)
    together = hessian(model, x, y).to_dense()
    monkeypatch.setattr(operators, "BATCHED_WORK", 0)
    torch.testing.assert_close(hessian(model, x, y).to_dense(), together)


def test_an_operation_that_vmap_cannot_take() -> None:
    """A look at values in the second derivative: columns go one by one then."""
    looks = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            looks.append(grad.sum().item())
            return grad.clone()

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            return 2 * grad * Look.apply(ctx.saved_tensors[0])

    model, x, y = case("tanh")
    reference = hessian(model, x, y, lambda f, _: f.square().mean())
    other = hessian(model, x, y, lambda f, _: Square.apply(f).mean())
    torch.testing.assert_close(other.to_dense(), reference.to_dense())
    assert len(looks) == other.shape[0]


def test_in_place_activation_after_the_layer() -> None:
    model, x, y = case("relu")
    truth = layer_hessian(model, "0", x, y).to_dense()
    model[1] = nn.ReLU(inplace=True)
    operator = layer_hessian(model, "0", x, y)
    assert operator.method == "factored"
    torch.testing.assert_close(operator.to_dense(), truth, rtol=0, atol=0)


def test_scipy() -> None:
    for dtype in (torch.float32, torch.float64):
        model, x, y = case("relu", dtype, 20)
        operator = layer_hessian(model, "2", x, y)
        linear = operator.to_scipy()
        assert linear.dtype == np.dtype(str(dtype).removeprefix("torch."))
        values = eigsh(linear, k=3, return_eigenvectors=False)
        truth = np.linalg.eigvalsh(operator.to_dense().numpy())[-3:]
        assert np.sort(values) == pytest.approx(truth, rel=1e-5)
        block = np.eye(16)[:, 2:5]
        assert linear.matmat(block).dtype == linear.dtype
        assert linear @ block == pytest.approx(operator.to_dense().numpy()[:, 2:5], abs=1e-7)
        assert linear.H @ block[:, 0] == pytest.approx(linear.matvec(block[:, :1]).ravel())


@pytest.mark.parametrize("name", ["relu", "tanh", "convolutional"])
@each_loss
def test_single_precision(name: str, loss: str) -> None:
    model, x, y = case(name)
    layer = weights(model)[0]
    pairs = [
        (hessian(model, x, y, loss), lambda m, z: hessian(m, z, y, loss)),
        (layer_hessian(model, layer, x, y, loss), lambda m, z: layer_hessian(m, layer, z, y, loss)),
        (gauss_newton(model, x, y, loss), lambda m, z: gauss_newton(m, z, y, loss)),
    ]
    small = copy.deepcopy(model).float()
    for exact, build in pairs:
        single = build(small, x.float())
        assert single.dtype == torch.float32
        assert single.method == exact.method
        truth = exact.to_dense()
        error = (single.to_dense().double() - truth).abs().max() / truth.abs().max()
        assert error < 1e-5


def test_repr() -> None:
    model, x, y = case("relu")
    text = repr(layer_hessian(model, "0", x, y))
    assert text == "CurvatureOperator(20 × 20, float64, cpu, factored)"


# --- the model stays as it is ---------------------------------------------------------------------


@contextmanager
def untouched(model: nn.Module, *tensors: Tensor) -> Iterator[None]:
    """Flags, gradients, modes, buffers, hooks, data and the global generator are the same after."""

    def look() -> list[object]:
        modules = [(m.training, len(m._forward_hooks)) for m in model.modules()]
        flags = [(p.requires_grad, p.grad is None, p._version) for p in model.parameters()]
        return [modules, flags, [t.requires_grad for t in tensors], torch.get_rng_state().tolist()]

    state = {name: value.clone() for name, value in model.state_dict().items()}
    values, before = [tensor.clone() for tensor in tensors], look()
    yield
    assert look() == before
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    for tensor, value in zip(tensors, values, strict=True):
        torch.testing.assert_close(tensor, value, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["convolutional", "residual", "relu"])
@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_of_the_model_changes(name: str, frozen: bool) -> None:
    model, x, y = case(name)
    model.requires_grad_(not frozen)
    x.requires_grad_()
    with untouched(model, x, y):
        for operator in (
            layer_hessian(model, weights(model)[0], x, y),
            hessian(model, x, y),
            gauss_newton(model, x, y),
        ):
            assert operator.to_dense().abs().max() > 0
    with untouched(model, x, y), pytest.raises(ValueError, match="not in the model"):
        layer_hessian(model, "nowhere", x, y)


def test_model_that_overwrites_its_input() -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sub_(1)

    model, x, y = case("relu")
    shifted = nn.Sequential(Shift(), model)
    with untouched(shifted, x):
        dense = layer_hessian(shifted, "1.0", x, y).to_dense()
    torch.testing.assert_close(dense, layer_hessian(model, "0", x - 1, y).to_dense())


@pytest.mark.parametrize("method", ["autograd", "factored"])
def test_operator_is_a_snapshot(method: str) -> None:
    """Training on, or overwriting the data, does not reach it."""
    model, x, y = case("relu")
    operators_ = [layer_hessian(model, "0", x, y, method=method), gauss_newton(model, x, y)]
    before = [operator.to_dense() for operator in operators_]
    with torch.no_grad():
        x.zero_()
        y.zero_()
        for p in model.parameters():
            p.mul_(2)
    for operator, dense in zip(operators_, before, strict=True):
        torch.testing.assert_close(operator.to_dense(), dense, rtol=0, atol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_around(mode: type) -> None:
    model, x, y = case("convolutional")
    truth = layer_hessian(model, "0", x, y).to_dense()
    with mode():
        for method in ("autograd", "factored"):
            inside = layer_hessian(model, "0", x.clone(), y, method=method)
            torch.testing.assert_close(inside.to_dense(), truth)
        hessian(model, x, y).to_dense()
        gauss_newton(model, x, y).to_dense()


def test_training_mode_without_random_parts_is_fine() -> None:
    model, x, y = case("relu")
    truth = layer_hessian(model.eval(), "0", x, y).to_dense()
    torch.testing.assert_close(layer_hessian(model.train(), "0", x, y).to_dense(), truth)


def test_attention() -> None:
    """The fused kernels cannot be differentiated twice; a linear layer read at each position."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, dropout=0.0)
    model = nn.Sequential(block, nn.Flatten(), nn.Linear(8, K)).double()
    x, y = torch.randn(N, 2, 4).double(), torch.arange(N) % K
    names = ["0.self_attn.in_proj_weight", "0.linear1.weight"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        truth = true_hessian(model, names, x, y, "cross_entropy")
    operator = hessian(model, x, y, "cross_entropy", parameters=names)
    torch.testing.assert_close(operator.to_dense(), truth, rtol=0, atol=1e-12)
    inner = layer_hessian(model, "0.linear1", x, y, "cross_entropy")
    assert inner.method == "autograd"
    torch.testing.assert_close(inner.to_dense(), truth[48:, 48:], rtol=0, atol=1e-12)


def test_no_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for operator in any_operators():
            operator.to_dense()


# --- errors ---------------------------------------------------------------------------------------


def refused(match: str, *, kind: type[Exception] = ValueError, **changes: object) -> None:
    """All three functions refuse the same data."""
    model, x, y = case("relu")
    given = {"model": model, "inputs": x, "targets": y, "loss": "mse"} | changes
    with pytest.raises(kind, match=match):
        layer_hessian(layer="0", **given)
    with pytest.raises(kind, match=match):
        hessian(**given)
    with pytest.raises(kind, match=match):
        gauss_newton(**given)


def test_bad_data() -> None:
    _, x, y = case("relu")
    bad = x.clone()
    bad[0, 0] = torch.inf
    refused("inputs hold NaN or infinite", inputs=bad)
    refused("inputs must hold at least one sample", inputs=x[:0], targets=y[:0])
    refused("7 inputs but 6 targets", targets=y[:6])
    refused("inputs must be a tensor, got list", kind=TypeError, inputs=x.tolist())
    refused("inputs are torch.float32, the model torch.float64", kind=TypeError, inputs=x.float())
    refused("targets must be in 0…2 for 3 outputs, got 0…3", targets=torch.arange(N) % 4)
    refused("got -100…2", targets=y - 100 * (y == 0))
    refused("got torch.bool", kind=TypeError, targets=y > 0)
    refused(
        r"integer targets must be classes \[N\], got \[7, 3\]", targets=functional.one_hot(y, K)
    )
    refused(r"floating targets must be \[7, 3\], got \[7\]", targets=y.double())
    refused("targets hold NaN", targets=torch.full((N, K), torch.nan))
    refused("must be probabilities", targets=torch.ones(N, K), loss="cross_entropy")
    refused("loss must be one of mse, cross_entropy", loss="hinge")


def test_bad_models() -> None:
    model, x, _ = case("relu")
    broken = copy.deepcopy(model)
    broken[2].weight.data[0, 0] = torch.nan
    refused("parameter 2.weight holds NaN", model=broken)
    refused("must be a torch.nn.Module, got builtin", kind=TypeError, model=torch.relu)
    refused("no parameters", model=nn.ReLU())
    refused(
        "parameter 0.weight is torch.float16", kind=TypeError, model=copy.deepcopy(model).half()
    )
    mixed = copy.deepcopy(model)
    mixed[4].float()
    refused("parameter 4.weight is torch.float32", kind=TypeError, model=mixed)
    single = nn.Sequential(nn.Linear(5, 1)).double()
    refused("K = 1", model=single, targets=torch.zeros(N, dtype=torch.long))
    refused(
        r"outputs must be \[7, K\].*got \[7, 1, 3\]",
        model=nn.Sequential(model, nn.Unflatten(1, (1, K))),
    )
    grown = copy.deepcopy(model)
    grown[4].weight.data *= 1e308
    refused("outputs hold NaN or infinite", model=grown, inputs=1e3 * x)


def test_models_that_are_random_or_mix_samples() -> None:
    model, x, y = case("relu")

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(model)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(functional.dropout(x, training=self.training))

    body = copy.deepcopy(model)
    for extra in (nn.Dropout(0.1), nn.BatchNorm1d(K).double(), nn.RReLU()):
        train = nn.Sequential(body, extra)
        train[1].train()
        refused(
            rf"{type(extra).__name__} '1' is in training mode: call model.eval\(\)", model=train
        )
    refused(r"two passes of the model differ: call model.eval\(\)", model=Functional().train())
    loose = nn.Sequential(body, nn.BatchNorm1d(K, track_running_stats=False).double()).eval()
    refused("no running statistics", model=loose)
    attention = nn.MultiheadAttention(4, 2, dropout=0.1).double()
    refused("MultiheadAttention '1' is in training", model=nn.Sequential(body, attention))
    assert layer_hessian(nn.Sequential(body, nn.Dropout(0.0)), "0.0", x, y).shape == (20, 20)

    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    mixing = nn.Sequential(body, Mixing())
    with pytest.raises(ValueError, match="samples are mixed"):
        layer_hessian(mixing, "0.0", x, y, method="factored")
    assert layer_hessian(mixing, "0.0", x, y).method == "autograd"


def test_bad_layers() -> None:
    model, x, y = case("relu")
    with pytest.raises(ValueError, match="'9' is not in the model; its layers are: '0', '2', '4'"):
        layer_hessian(model, "9", x, y)
    with pytest.raises(ValueError, match="layer Linear is not in the model"):
        gauss_newton(model, x, y, layer=nn.Linear(5, 4))
    with pytest.raises(ValueError, match="'1' is a ReLU, not Linear or Conv2d"):
        layer_hessian(model, model[1], x, y)
    with pytest.raises(TypeError, match="got int"):
        layer_hessian(model, 0, x, y)  # type: ignore[arg-type]
    spare, _, _ = case("spare")
    for method in ("auto", "autograd", "factored"):
        with pytest.raises(ValueError, match="is it used at all"):
            layer_hessian(spare, "spare", x, y, method=method)
    normed = copy.deepcopy(model)
    nn.utils.parametrizations.weight_norm(normed[0])
    with pytest.raises(ValueError, match="parametrization"):
        layer_hessian(normed, "0", x, y)
    with pytest.raises(ValueError, match=r"no parameter '0\.wait'"):
        hessian(model, x, y, parameters=["0.wait"])
    for nothing in ([], "0.weight"):
        with pytest.raises(ValueError, match="sequence of one name or more"):
            hessian(model, x, y, parameters=nothing)


def test_layers_that_have_no_factors() -> None:
    model, x, y = case("twice")
    with pytest.raises(ValueError, match='used 2 times a pass: use method="autograd"'):
        layer_hessian(model, "layer", x, y, method="factored")
    model, x, y = case("hidden")
    with pytest.raises(ValueError, match="used elsewhere"):
        layer_hessian(model, "layer", x, y, method="factored")
    repeated = nn.Sequential(model.layer, nn.ReLU(), model.layer, model.head)
    with pytest.raises(ValueError, match="used 2 times a pass"):
        layer_hessian(repeated, "2", x, y, method="factored")
    tied = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, K)).double()
    tied[2].weight = tied[0].weight
    for layer in ("0", "2"):
        with pytest.raises(ValueError, match="is shared"):
            layer_hessian(tied, layer, x, y, method="factored")
        operator = layer_hessian(tied, layer, x, y)
        assert operator.method == "autograd"
        torch.testing.assert_close(
            operator.to_dense(), true_hessian(tied, ["0.weight"], x, y, "mse")
        )
    grouped = nn.Sequential(nn.Conv2d(2, 2, 2, groups=2), nn.Flatten(), nn.Linear(8, K)).double()
    images = torch.randn(N, 2, 3, 3).double()
    with pytest.raises(ValueError, match="is grouped"):
        layer_hessian(grouped, "0", images, y, method="factored")
    truth = true_hessian(grouped, ["0.weight"], images, y, "mse")
    torch.testing.assert_close(layer_hessian(grouped, "0", images, y).to_dense(), truth)
    tokens = nn.Sequential(nn.Linear(3, 2), nn.Flatten(), nn.Linear(4, K)).double()
    with pytest.raises(ValueError, match=r"reads \[7, 2, 3\], not \[N, I\]"):
        layer_hessian(tokens, "0", images[:, :, 0], y, method="factored")


def test_layer_under_two_names() -> None:
    model, x, y = case("relu")
    model.again = model[2]  # type: ignore[assignment]
    model.forward = nn.Sequential.forward.__get__(model[:5])  # type: ignore[method-assign]
    for layer in ("2", "again", model[2]):
        assert layer_hessian(model, layer, x, y).method == "factored"


def test_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = case("convolutional")
    truth = layer_hessian(model, "0", x, y).to_dense()
    monkeypatch.setattr(operators, "MEMORY_LIMIT", 7000)  # 6048 bytes written out, 18816 factored
    with pytest.raises(ValueError, match=r"GiB, more than .* give a smaller batch_size"):
        layer_hessian(model, "0", x, y, method="factored")
    small = layer_hessian(model, "0", x, y, method="factored", batch_size=1)
    torch.testing.assert_close(small.to_dense(), truth)
    monkeypatch.setattr(operators, "MEMORY_LIMIT", 100)
    with pytest.raises(ValueError, match='use method="autograd" \\(and a batch_size\\)'):
        layer_hessian(model, "0", x, y, method="factored")
    assert layer_hessian(model, "0", x, y).method == "autograd"
    assert gauss_newton(model, x, y, layer="0").method == "autograd"


def test_bad_options() -> None:
    model, x, y = case("relu")
    with pytest.raises(ValueError, match="method must be one of auto, autograd, factored"):
        layer_hessian(model, "0", x, y, method="exact")
    for batch_size in (0, 2.5, "all"):
        with pytest.raises(ValueError, match="batch_size must be a positive integer"):
            hessian(model, x, y, batch_size=batch_size)  # type: ignore[arg-type]
    for loss in (functional.cross_entropy,):
        with pytest.raises(ValueError, match='a callable loss needs method="autograd"'):
            layer_hessian(model, "0", x, y, loss, method="factored")
        with pytest.raises(ValueError, match="not a callable"):
            gauss_newton(model, x, y, loss)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must return a scalar tensor"):
        hessian(model, x, y, lambda outputs, _: outputs)
    with pytest.raises(ValueError, match="does not depend on"):
        hessian(model, x, y, lambda outputs, _: outputs.detach().mean())


def test_bad_directions() -> None:
    model, x, y = case("relu")
    operator = layer_hessian(model, "0", x, y)
    with pytest.raises(ValueError, match=r"must be \[20\], got \[19\]"):
        operator.matvec(torch.ones(19, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"must be \[20\], got \[20, 1\]"):
        operator.matvec(torch.ones(20, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"must be \[20, b\], got \[19, 2\]"):
        operator.matmat(torch.ones(19, 2, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"is torch\.float64, the direction torch\.float32"):
        operator @ torch.ones(20)
    with pytest.raises(TypeError, match="got ndarray"):
        operator @ np.ones(20)
    with pytest.raises(TypeError, match="got list"):
        operator @ [1.0] * 20
    assert operator.applications == 0


@pytest.mark.gpu
@each_model
@each_loss
def test_on_the_gpu(name: str, loss: str) -> None:
    model, x, y = case(name)
    layer = weights(model)[0]
    truth = [op.to_dense() for op in (hessian(model, x, y, loss), gauss_newton(model, x, y, loss))]
    truth.append(layer_hessian(model, layer, x, y, loss).to_dense())
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    ours = [hessian(model, x, y, loss), gauss_newton(model, x, y, loss)]
    ours.append(layer_hessian(model, layer, x, y, loss))
    for operator, dense in zip(ours, truth, strict=True):
        assert operator.device.type == "cuda"
        torch.testing.assert_close(operator.to_dense().cpu(), dense, rtol=0, atol=1e-12)
