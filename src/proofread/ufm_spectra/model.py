"""The deep unconstrained feature model as an ordinary classifier, and a minimiser for it.

The features of all training samples are free parameters, as if the network before them could
produce anything; ``depth`` layers without biases follow. The objective is the data term plus
``Σ_l λ_l/2 ‖W_l‖² + λ_H/2 ‖H‖²``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .relu import relu_collapse

if TYPE_CHECKING:
    from .optimum import CollapsedOptimum

__all__ = ["UnconstrainedFeatureModel", "initial_point", "minimise"]

Activation = Literal["linear", "relu"]
Loss = Literal["mse", "cross_entropy"]
ACTIVATIONS = ("linear", "relu")
LOSSES = ("mse", "cross_entropy")


class UnconstrainedFeatureModel(nn.Module):
    """K classes of free features under L bias-free layers; maps ``[N, d]`` to ``[N, K]``.

    In the ReLU model the features pass a ReLU (so the first layer's inputs are not negative) and
    so does the output of every layer but the last.

    Args:
        n_classes: K, at least 2.
        n_per_class: samples of each class n; class c owns rows c·n … (c+1)·n − 1.
        depth: number of layers L, at least 1.
        width: d, of the features and of every hidden layer.
        activation: ``"linear"`` or ``"relu"``.
        loss: ``"mse"``, half the mean squared distance to one-hot targets summed over classes, or
            ``"cross_entropy"``.
        weight_decay: λ, or one a layer.
        feature_decay: λ_H.
        seed: of the start, see ``initial_point``.
        init_scale: factor on every parameter of the start.
        dtype: of all parameters.
        class_counts: samples of each class where they differ; ``n_per_class`` is then unused.

    Attributes:
        features: ``[N, d]`` parameter.
        layers: the L ``nn.Linear`` layers; ``layers.1`` is the second.

    Raises:
        ValueError: a size below its minimum, an unknown activation or loss, a negative decay or
            one that is not finite, decays or counts of another number than layers or classes.
    """

    def __init__(
        self,
        n_classes: int,
        n_per_class: int,
        depth: int,
        width: int,
        *,
        activation: Activation = "linear",
        loss: Loss = "mse",
        weight_decay: float | Sequence[float] = 0.005,
        feature_decay: float = 0.005,
        seed: int = 0,
        init_scale: float = 1.0,
        dtype: torch.dtype = torch.float64,
        class_counts: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        check_sizes(n_classes, n_per_class, depth, width)
        self.activation, self.loss = check_kind(activation, loss)
        self.weight_decay = check_decays(weight_decay, depth)
        self.feature_decay = check_decay("feature_decay", feature_decay)
        self.n_classes, self.n_per_class, self.depth, self.width = (
            n_classes,
            n_per_class,
            depth,
            width,
        )
        self.class_counts = _check_counts(class_counts, n_classes, n_per_class)
        rows = sum(self.class_counts)
        features, weights = initial_point(
            n_classes, rows, depth, width, seed=seed, scale=init_scale
        )
        self.features = nn.Parameter(features.to(dtype))
        self.layers = nn.ModuleList(_linear(weight.to(dtype)) for weight in weights)

    def targets(self) -> Tensor:
        """``[N]`` classes (int64), in the order of the rows of ``features``."""
        counts = torch.tensor(self.class_counts, device=self.features.device)
        return torch.arange(self.n_classes, device=counts.device).repeat_interleave(counts)

    def layer_inputs(self, x: Tensor | None = None) -> list[Tensor]:
        """Inputs ``h_1 … h_L`` of the layers, each ``[N, d]``, for ``x`` or the own features."""
        inputs = [self._activate(self._checked(x))]
        for layer in list(self.layers)[:-1]:
            inputs.append(self._activate(layer(inputs[-1])))
        return inputs

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Outputs ``[N, K]`` for features ``x [N, d]``, the model's own by default."""
        outputs: Tensor = self.layers[-1](self.layer_inputs(x)[-1])
        return outputs

    def data_loss(self) -> Tensor:
        """The data term at the own features, a scalar."""
        outputs, targets = self(), self.targets()
        if self.loss == "cross_entropy":
            return F.cross_entropy(outputs, targets)
        onehot = F.one_hot(targets, self.n_classes).to(outputs.dtype)
        return (outputs - onehot).square().sum() / (2 * len(outputs))

    def objective(self) -> Tensor:
        """The data term plus the penalties on weights and features, a scalar."""
        penalty = self.feature_decay * self.features.square().sum()
        for decay, weight in zip(self.weight_decay, self._weights(), strict=True):
            penalty = penalty + decay * weight.square().sum()
        return self.data_loss() + penalty / 2

    @torch.no_grad()
    def load_optimum(self, optimum: CollapsedOptimum, seed: int | None = None) -> None:
        """Copy the weights and features of a collapsed optimum into the parameters.

        Args:
            optimum: of the same K, n, L and d.
            seed: of the rotations of a generic representative; None for the aligned one. The ReLU
                model has the aligned one only (see ``relu.relu_collapse``).

        Raises:
            ValueError: shapes that differ, or a seed for a ReLU model.
        """
        if self.activation == "relu" and seed is not None:
            raise ValueError("seed must be None for a ReLU model: rotations leave its optimum")
        if self.activation == "relu":
            weights, features = relu_collapse(optimum)
        else:
            weights, features = list(optimum.weights(seed)), optimum.features(seed)
        wanted = [features.T.shape, *(weight.shape for weight in weights)]
        found = [self.features.shape, *(weight.shape for weight in self._weights())]
        if wanted != found:
            raise ValueError(
                f"the optimum's features and weights have shapes {_shown(wanted)}, the model's "
                f"{_shown(found)}: build the model with the optimum's sizes"
            )
        self.features.copy_(features.T)
        for own, weight in zip(self._weights(), weights, strict=True):
            own.copy_(weight)

    def extra_repr(self) -> str:
        """Activation, loss and decays, for ``repr``."""
        decays = f"weight_decay={self.weight_decay}, feature_decay={self.feature_decay}"
        return f"{self.activation}, {self.loss}, {decays}"

    def _weights(self) -> list[Tensor]:
        return [cast(nn.Linear, layer).weight for layer in self.layers]

    def _activate(self, x: Tensor) -> Tensor:
        return x.relu() if self.activation == "relu" else x

    def _checked(self, x: Tensor | None) -> Tensor:
        if x is None:
            return self.features
        if x.ndim != 2 or x.shape[1] != self.width:
            raise ValueError(f"x must be [N, {self.width}], got {list(x.shape)}")
        return x


def initial_point(
    n_classes: int, n_samples: int, depth: int, width: int, *, seed: int = 0, scale: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    """A random start: features ``[N, d]`` and L weights ``[out, in]``, float64.

    Weights are normal of variance ``1/d``, which keeps norms on the way; features are the absolute
    values of such numbers, norm about 1; all times ``scale``. Linear and ReLU models start alike:
    under a ReLU a negative feature would have no gradient, ever.
    """
    draw = torch.Generator().manual_seed(operator.index(seed))
    sizes = [(n_samples, width), *[(width, width)] * (depth - 1), (n_classes, width)]
    factor = scale / math.sqrt(width)
    features, *weights = (
        factor * torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes
    )
    return features.abs(), weights


def minimise(
    model: UnconstrainedFeatureModel, tolerance: float = 1e-9, max_iterations: int = 20_000
) -> float:
    """Minimise ``model.objective()`` in place by L-BFGS with a strong Wolfe line search.

    Where it ends depends on the start: with decay and two or more layers every singular value of
    the product may also settle at 0, in a local minimum of lower rank. Larger starts avoid it
    (``init_scale=3`` did at the book's sizes); compare the objective with the closed form.

    Args:
        model: started anywhere, float64.
        tolerance: on the norm of the gradient in all parameters.
        max_iterations: of L-BFGS in all.

    Returns:
        The final norm of the gradient.

    Raises:
        ValueError: parameters that are not float64.
        RuntimeError: the tolerance was not reached.
    """
    if model.features.dtype != torch.float64:
        raise ValueError("model must be float64: single precision stalls far from the tolerance")
    parameters, spent = list(model.parameters()), 0
    norm = _gradient_norm(model)
    while norm > tolerance and spent < max_iterations and math.isfinite(norm):
        # Near the minimum the line search sees rounding only; plain unit steps go on from there.
        search = "strong_wolfe" if norm > 1e-6 else None
        optimiser = torch.optim.LBFGS(
            parameters,
            max_iter=min(1000, max_iterations - spent),
            max_eval=10**9,
            tolerance_grad=tolerance / (2 * math.sqrt(sum(p.numel() for p in parameters))),
            tolerance_change=0.0,
            history_size=50,
            line_search_fn=search,
        )
        optimiser.step(partial(_with_gradient, model, optimiser))
        spent += optimiser.state[parameters[0]]["n_iter"]
        norm = _gradient_norm(model)
    if not norm <= tolerance:
        raise RuntimeError(
            f"gradient norm {norm:.2g} above tolerance={tolerance:g} after {spent} iterations: "
            "raise max_iterations or the tolerance, or take another seed"
        )
    return norm


def _with_gradient(model: UnconstrainedFeatureModel, optimiser: torch.optim.Optimizer) -> Tensor:
    optimiser.zero_grad()
    value = model.objective()
    value.backward()  # type: ignore[no-untyped-call]
    return value


def _gradient_norm(model: UnconstrainedFeatureModel) -> float:
    gradients = torch.autograd.grad(model.objective(), list(model.parameters()))
    return math.sqrt(sum(float(g.square().sum()) for g in gradients))


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight)
    return layer


def _shown(shapes: Sequence[torch.Size]) -> str:
    return ", ".join("×".join(map(str, shape)) for shape in shapes)


# --- checks that the dynamics share ------------------------------------------------------------


def check_sizes(n_classes: int, n_per_class: int, depth: int, width: int) -> None:
    """Raise ``ValueError`` for sizes without a model: K < 2, n < 1, L < 1, d < 1."""
    sizes = {"n_classes": n_classes, "n_per_class": n_per_class, "depth": depth, "width": width}
    for name, size in sizes.items():
        least = 2 if name == "n_classes" else 1
        if size < least:
            raise ValueError(f"{name}={size} must be at least {least}")


def check_kind(activation: str, loss: str) -> tuple[str, str]:
    """The pair, or ``ValueError`` if either is unknown."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {ACTIVATIONS}")
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} must be one of {LOSSES}")
    return activation, loss


def check_decays(weight_decay: float | Sequence[float], depth: int) -> tuple[float, ...]:
    """One decay a layer from one for all, or ``ValueError``."""
    decays = (weight_decay,) * depth if not isinstance(weight_decay, Sequence) else weight_decay
    if len(decays) != depth:
        raise ValueError(f"weight_decay must be one number or depth={depth}, got {len(decays)}")
    return tuple(check_decay("weight_decay", decay) for decay in decays)


def check_decay(name: str, decay: float) -> float:
    """A finite decay that is not negative, or ``ValueError``."""
    if not (math.isfinite(decay) and decay >= 0):
        raise ValueError(f"{name}={decay} must be finite and not negative")
    return float(decay)


def _check_counts(
    counts: Sequence[int] | None, n_classes: int, n_per_class: int
) -> tuple[int, ...]:
    if counts is None:
        return (n_per_class,) * n_classes
    if len(counts) != n_classes or min(counts) < 1:
        raise ValueError(f"class_counts must hold {n_classes} positive counts, got {list(counts)}")
    return tuple(counts)
