"""Gradient descent of many unconstrained feature models at once, with the spectra on the way.

All seeds share one batched product in each layer, forward and backward are written out by hand,
and every buffer is made once: at the book's size (seven seeds, 30 samples, width 20) automatic
differentiation would spend most of its time between kernels. Seeds don't interact.

**Exact spectra.** The network is piecewise linear, so off its kinks the data term's Hessian in
``W_l`` is ``Jᵀ J``, where ``J`` has a row ``(B_iᵀ A_i)_k ⊗ h_i / √N`` for each sample i and output
k: ``A_i`` is the derivative of the outputs in the layer's pre-activations and ``B_i B_iᵀ`` the
loss's second derivative, ``I`` or ``diag(p) − p pᵀ`` with ``B = diag(√p) − p √pᵀ``. Units at 0
count as closed, as in PyTorch. Of ``Jᵀ J`` and ``J Jᵀ`` the smaller is diagonalised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .model import (
    Activation,
    Loss,
    check_decay,
    check_decays,
    check_kind,
    check_sizes,
    initial_point,
)

__all__ = ["Trajectories", "train_models"]

Floats = NDArray[np.float64]
CHECK_EVERY = 1000  # steps between looks for a NaN
ROUNDING = 1e-13  # eigenvalues below this share of the largest count as 0


@dataclass(frozen=True)
class Trajectories:
    """What gradient descent showed at C checkpoints, for S seeds and L layers.

    Eigenvalues and eigenvectors are those of the data term's Hessian in one layer's weight, without
    the decay; class means of "layer L + 1" are those of the outputs.

    Attributes:
        steps: ``[C]`` step numbers.
        n_classes: K.
        eigenvalues: ``[C, S, L, 2K²]`` the largest, descending; zeros if there are fewer.
        alignment: ``[C, S, L]`` mean over the K² products of class means, ``μ_c^(l+1) ⊗ μ_c'^(l)``
            normalised, of the squared norm of their projection on the K² leading eigenvectors
            (those of them with an eigenvalue that is not 0).
        collapse: ``[C, S, L]`` within-class over between-class variance (traces) of the layer's
            inputs.
        gradient_share: ``[C, S, L]`` share of the data term's squared gradient norm in the span of
            the K products ``μ_c^(l+1) ⊗ μ_c^(l)`` of the same class.
        objective: ``[C, S]`` with penalties.
        gradient_norm: ``[C, S]`` of the objective's gradient in all weights and features.
        weights: the last weights, L arrays ``[S, out, in]``.
        features: the last features ``[S, d, N]``; in the ReLU model before their ReLU.
    """

    steps: NDArray[np.int64]
    n_classes: int
    eigenvalues: Floats
    alignment: Floats
    collapse: Floats
    gradient_share: Floats
    objective: Floats
    gradient_norm: Floats
    weights: tuple[Floats, ...]
    features: Floats

    @property
    def outlier_ratio(self) -> Floats:
        """``λ_1 / λ_{K²}``, ``[C, S, L]``; infinite where the rank is below K²."""
        return _ratio(self._eigenvalue(1), self._eigenvalue(self.n_classes**2))

    @property
    def gap(self) -> Floats:
        """``λ_{K²} / λ_{K²+1}``, ``[C, S, L]``; infinite where the rank is K², 0 if below it."""
        k2 = self.n_classes**2
        return _ratio(self._eigenvalue(k2), self._eigenvalue(k2 + 1))

    def _eigenvalue(self, number: int) -> Floats:
        """The eigenvalue of that number, counted from 1; 0 where it is rounding."""
        value, largest = self.eigenvalues[..., number - 1], self.eigenvalues[..., 0]
        return np.where(value > ROUNDING * largest, value, 0.0)


def _ratio(over: Floats, under: Floats) -> Floats:
    infinite = np.where(over > 0, np.inf, 0.0)
    return np.divide(over, under, out=infinite, where=under > 0)


def train_models(
    seeds: Sequence[int],
    *,
    n_classes: int,
    n_per_class: int,
    depth: int,
    width: int,
    activation: Activation = "linear",
    loss: Loss = "mse",
    weight_decay: float | Sequence[float] = 0.005,
    feature_decay: float = 0.005,
    lr: float = 0.5,
    steps: int = 10_000,
    checkpoints: Iterable[int] = (0,),
    init_scale: float = 1.0,
    decayed: bool = True,
    progress: bool | None = None,
) -> Trajectories:
    """Full-batch gradient descent of one model a seed, all at once, in float64.

    The models and their starts are those of ``UnconstrainedFeatureModel(…, seed=seed)``, the same
    start for either activation and loss. A seed gives the same numbers alone and among others.

    Args:
        seeds: one a model, at least one.
        n_classes: K, at least 2.
        n_per_class: samples of each class.
        depth: number of layers L.
        width: d.
        activation: ``"linear"`` or ``"relu"``.
        loss: ``"mse"`` or ``"cross_entropy"``.
        weight_decay: λ, or one a layer.
        feature_decay: λ_H.
        lr: step size, the same for weights and features. Near the collapsed optimum of equal
            decays λ the largest stable one is about ``2(1 − γ)/((L + 1)λ)``.
        steps: number of steps.
        checkpoints: step numbers from 0 to ``steps`` at which to record; after the last step the
            record is made anyway.
        init_scale: factor on every parameter of the start.
        decayed: False trains without any decay, as a control.
        progress: show a bar; by default where standard error is a terminal.

    Raises:
        ValueError: sizes, decays, activation or loss that ``UnconstrainedFeatureModel`` refuses, no
            seed, ``lr`` not finite and positive, ``steps`` below 0, checkpoints outside.
        FloatingPointError: the descent diverged; the message names ``lr``.
    """
    check_sizes(n_classes, n_per_class, depth, width)
    check_kind(activation, loss)
    decays = (check_decay("feature_decay", feature_decay), *check_decays(weight_decay, depth))
    marks = _schedule(seeds, lr, steps, checkpoints)
    sizes = (n_classes, n_classes * n_per_class, depth, width)
    starts = [initial_point(*sizes, seed=seed, scale=init_scale) for seed in seeds]
    layers = zip(*(weights for _, weights in starts), strict=True)
    descent = _Descent(
        np.stack([features.numpy().T for features, _ in starts]),
        [np.stack([weight.numpy() for weight in layer]) for layer in layers],
        relu=activation == "relu",
        softmax=loss == "cross_entropy",
        decays=decays if decayed else (0.0,) * len(decays),
    )
    records = []
    with _progress(steps, progress) as bar, np.errstate(over="ignore", invalid="ignore"):
        for mark in marks:
            while descent.step < mark:
                bar.update(descent.descend(lr, min(mark - descent.step, CHECK_EVERY)))
            records.append(descent.measure())
    columns = {name: np.stack([record[name] for record in records]) for name in records[0]}
    return Trajectories(
        steps=np.array(marks),
        n_classes=n_classes,
        weights=tuple(descent.weights),
        features=descent.features,
        **columns,
    )


def _schedule(seeds: Sequence[int], lr: float, steps: int, checkpoints: Iterable[int]) -> list[int]:
    if not len(seeds):
        raise ValueError("seeds must hold at least one seed")
    if not (math.isfinite(lr) and lr > 0):
        raise ValueError(f"lr={lr} must be finite and positive")
    if steps < 0:
        raise ValueError(f"steps={steps} must not be negative")
    marks = sorted({*(int(mark) for mark in checkpoints), steps})
    if not (marks[0] >= 0 and marks[-1] <= steps):
        raise ValueError(f"checkpoints must lie between 0 and steps={steps}, got {marks}")
    return marks


def _progress(total: int, shown: bool | None) -> Any:
    from tqdm import tqdm  # tqdm.auto would warn on stderr in a kernel without ipywidgets

    return tqdm(total=total, desc="steps", disable=None if shown is None else not shown)


class _Descent:
    """S models with their buffers: ``features [S, d, N]``, weights ``[S, out, in]``.

    ``inputs[l]`` is the input of layer l + 1, the last one the outputs; ``deltas[l]`` is the
    derivative in it, times the step size.
    """

    def __init__(
        self,
        features: Floats,
        weights: list[Floats],
        *,
        relu: bool,
        softmax: bool,
        decays: Sequence[float],
    ) -> None:
        self.features, self.weights = np.ascontiguousarray(features), weights
        self.relu, self.softmax, self.decays, self.step = relu, softmax, decays, 0
        seeds, _, samples = features.shape
        k = weights[-1].shape[1]
        self.targets = np.repeat(np.eye(k), samples // k, axis=1)
        heights = [features.shape[1], *(weight.shape[1] for weight in weights)]
        self.inputs = [np.empty((seeds, height, samples)) for height in heights]
        self.deltas = [np.empty_like(inputs) for inputs in self.inputs]
        self.gradients = [np.empty_like(weight) for weight in weights]
        self.open = np.empty(features.shape, dtype=bool)

    def descend(self, lr: float, count: int) -> int:
        """``count`` steps; returns ``count``."""
        shrink = [1 - lr * decay for decay in self.decays]
        parameters = (self.features, *self.weights)
        updates = (self.deltas[0], *self.gradients)
        for _ in range(count):
            self._forward()
            self._backward(lr)
            for parameter, update, factor in zip(parameters, updates, shrink, strict=True):
                np.multiply(parameter, factor, out=parameter)
                np.subtract(parameter, update, out=parameter)
        self.step += count
        if not all(np.isfinite(parameter).all() for parameter in parameters):
            raise FloatingPointError(
                f"gradient descent diverged by step {self.step}: take lr below {lr:g}, or smaller "
                "init_scale"
            )
        return count

    def _forward(self) -> None:
        if self.relu:
            np.maximum(self.features, 0.0, out=self.inputs[0])
        else:
            np.copyto(self.inputs[0], self.features)
        for layer, weight in enumerate(self.weights):
            after = self.inputs[layer + 1]
            np.matmul(weight, self.inputs[layer], out=after)
            if self.relu and layer + 1 < len(self.weights):
                np.maximum(after, 0.0, out=after)

    def _backward(self, scale: float) -> None:
        """Gradients of the data term times ``scale``, after ``_forward``."""
        outputs, delta = self.inputs[-1], self.deltas[-1]
        np.subtract(_softmax(outputs) if self.softmax else outputs, self.targets, out=delta)
        delta *= scale / outputs.shape[2]
        for layer in reversed(range(len(self.weights))):
            inputs, before = self.inputs[layer], self.deltas[layer]
            np.matmul(delta, inputs.transpose(0, 2, 1), out=self.gradients[layer])
            np.matmul(self.weights[layer].transpose(0, 2, 1), delta, out=before)
            if self.relu:
                np.greater(inputs, 0.0, out=self.open)
                before *= self.open
            delta = before

    def measure(self) -> dict[str, Floats]:
        """One record: each field of ``Trajectories`` without its first axis."""
        self._forward()
        self._backward(1.0)
        k = len(self.targets)
        means = [_class_means(inputs, k) for inputs in self.inputs]
        rows = []
        for layer, backward in enumerate(self._derivatives()):
            products = _products(means[layer + 1], means[layer])
            eigenvalues, alignment = _spectrum(backward, self.inputs[layer], products, 2 * k**2)
            share = _share(self.gradients[layer], products[..., :: k + 1])
            rows.append((eigenvalues, alignment, _spread(self.inputs[layer], k), share))
        names = ("eigenvalues", "alignment", "collapse", "gradient_share")
        record = {
            name: np.stack(column, axis=1)
            for name, column in zip(names, zip(*rows, strict=True), strict=True)
        }
        return record | {"objective": self._objective(), "gradient_norm": self._gradient_norm()}

    def _derivatives(self) -> list[Floats]:
        """``B_iᵀ A_i`` of each layer, ``[S, N, K, out]``."""
        outputs = self.inputs[-1].transpose(0, 2, 1)  # [S, N, K]
        root = np.broadcast_to(np.eye(outputs.shape[2]), (*outputs.shape, outputs.shape[2]))
        if self.softmax:
            p = _softmax(self.inputs[-1]).transpose(0, 2, 1)[..., None]  # [S, N, K, 1]
            root = root * np.sqrt(p) - np.sqrt(p) * p.swapaxes(2, 3)  # Bᵀ
        found = [np.array(root)]
        for weight, inputs in zip(self.weights[:0:-1], self.inputs[-2:0:-1], strict=True):
            before = found[-1] @ weight[:, None]
            if self.relu:
                before *= (inputs > 0).transpose(0, 2, 1)[:, :, None]
            found.append(before)
        return found[::-1]

    def _objective(self) -> Floats:
        outputs = self.inputs[-1]
        if self.softmax:
            shifted = outputs - outputs.max(1, keepdims=True)
            losses = np.log(np.exp(shifted).sum(1)) - (shifted * self.targets).sum(1)
        else:
            losses = ((outputs - self.targets) ** 2).sum(1) / 2
        parameters = zip(self.decays, (self.features, *self.weights), strict=True)
        return losses.mean(1) + sum(decay / 2 * _square(p) for decay, p in parameters)

    def _gradient_norm(self) -> Floats:
        parameters = (self.features, *self.weights)
        gradients = (self.deltas[0], *self.gradients)
        triples = zip(self.decays, parameters, gradients, strict=True)
        return np.sqrt(sum(_square(g + decay * p) for decay, p, g in triples))


def _square(x: Floats) -> Floats:
    """Squared norm for each seed, ``[S]``."""
    return np.asarray((x**2).sum((1, 2)))


def _softmax(outputs: Floats) -> Floats:
    powers = np.exp(outputs - outputs.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def _class_means(x: Floats, k: int) -> Floats:
    """``[S, d, K]`` of ``x [S, d, N]``, ordered by class."""
    return np.asarray(x.reshape(*x.shape[:2], k, -1).mean(3))


def _spread(x: Floats, k: int) -> Floats:
    """Trace of the within-class over that of the between-class covariance, ``[S]``."""
    classes = x.reshape(*x.shape[:2], k, -1)
    means = classes.mean(3, keepdims=True)
    within = ((classes - means) ** 2).mean((2, 3)).sum(1)
    between = ((means - means.mean(2, keepdims=True)) ** 2).mean((2, 3)).sum(1)
    return _ratio(within, between)


def _products(above: Floats, below: Floats) -> Floats:
    """Normalised products of all pairs of means, ``[S, out · in, K²]``; zero for a zero mean."""
    pair = np.einsum("soc,sie->soice", _unit(above), _unit(below))
    return pair.reshape(len(pair), -1, pair.shape[-1] ** 2)


def _unit(columns: Floats) -> Floats:
    norms = np.linalg.norm(columns, axis=1, keepdims=True)
    return np.divide(columns, norms, out=np.zeros_like(columns), where=norms > 0)


def _spectrum(
    backward: Floats, inputs: Floats, products: Floats, count: int
) -> tuple[Floats, Floats]:
    """``count`` eigenvalues ``[S, count]`` of the layer's Hessian and the alignment ``[S]``."""
    seeds, samples, k, _ = backward.shape
    rows = np.einsum("snko,sin->snkoi", backward, inputs) / math.sqrt(samples)
    jacobian = rows.reshape(seeds, samples * k, -1)  # [S, NK, P]
    small = jacobian.shape[1] <= jacobian.shape[2]
    transposed = jacobian.transpose(0, 2, 1)
    values, vectors = np.linalg.eigh(jacobian @ transposed if small else transposed @ jacobian)
    values, vectors = values[:, ::-1].clip(0.0), vectors[:, :, ::-1]
    leading, top = values[:, : k**2], vectors[:, :, : k**2].transpose(0, 2, 1)
    seen = top @ (jacobian @ products) if small else top @ products  # [S, K², K²]
    scale = leading if small else np.ones_like(leading)
    squares = np.divide(
        (seen**2).mean(2),
        scale,
        out=np.zeros_like(leading),
        where=leading > ROUNDING * values[:, :1],
    )
    padded = np.zeros((seeds, count))
    padded[:, : values.shape[1]] = values[:, :count]
    return padded, squares.sum(1)


def _share(gradient: Floats, basis: Floats) -> Floats:
    """Share of the squared norm of ``gradient [S, out, in]`` in the span of ``basis [S, P, K]``."""
    flat = gradient.reshape(len(gradient), -1, 1)
    transposed = basis.transpose(0, 2, 1)
    inner = transposed @ flat  # [S, K, 1]
    inverse = np.linalg.pinv(transposed @ basis, rcond=1e-10, hermitian=True)
    return _ratio((inner * (inverse @ inner)).sum((1, 2)), (flat**2).sum((1, 2)))
