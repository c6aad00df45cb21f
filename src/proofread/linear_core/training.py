"""Training small classifiers with different losses under label noise, many runs at once.

A run is a two-layer perceptron, ``d → hidden → K`` with ReLU, trained by stochastic gradient
descent with momentum. Runs of one loss that differ in seed or learning rate are independent of one
another, so they are stacked and trained together: ``[R, B, d] @ [R, d, H]``, one batched matrix
product instead of R small ones. Nothing is shared between members but the pictures: each has its
own initial weights, batch order, labels and learning rate, all from its own seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from .losses import linear_core_loss
from .noise import instance_dependent_noise
from .surrogates import LinearCore

# --- losses ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A multi-class loss, as the comparison needs it.

    Attributes:
        name: name in tables and figures.
        rows: ``(logits [n, K], target [n]) → [n]``, the loss of each row.
        slope: ``(logits [n, K], target [n]) → [n]``, ``|ℓ'|`` in [0, 1] at the strongest wrong
            class; see ``margin_slopes``.
    """

    name: str
    rows: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


def _cross_entropy_rows(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none")


def _cross_entropy_slope(logits: Tensor, target: Tensor) -> Tensor:
    return 1 - logits.softmax(1).gather(1, target[:, None])[:, 0]


def _hinge_rows(logits: Tensor, target: Tensor) -> Tensor:
    """Constrained hinge with margin 1 (Lee, Lin and Wahba): ``Σ_{y'≠y} max(0, 1 + h̃_{y'})``."""
    centred = logits - logits.mean(1, keepdim=True)
    return F.relu(1 + centred).scatter(1, target[:, None], 0.0).sum(1)


def _strongest_wrong(logits: Tensor, target: Tensor) -> Tensor:
    """``[n]``: the largest centred logit of a wrong class."""
    centred = logits - logits.mean(1, keepdim=True)
    return centred.scatter(1, target[:, None], -math.inf).amax(1)


def _hinge_slope(logits: Tensor, target: Tensor) -> Tensor:
    return (1 + _strongest_wrong(logits, target) > 0).to(logits.dtype)


def _label_probability(logits: Tensor, target: Tensor) -> Tensor:
    """``[n]``: the softmax probability of the label."""
    return logits.softmax(1).gather(1, target[:, None])[:, 0]


def generalized_cross_entropy_entry(q: float = 0.7) -> Loss:
    """``(1 - p_y^q)/q`` as an entry for ``LOSSES``: cross-entropy as q → 0, at q = 1 the mean
    absolute error ``1 - p_y`` (half of ``‖p - e_y‖₁``).

    Source: Zhang and Sabuncu, *Generalized Cross Entropy Loss for Training Deep Neural Networks
    with Noisy Labels* (NeurIPS 2018), where q = 0.7 is the default. Its slope in the log-odds of
    the label is ``p_y^q·(1 - p_y)``: small for samples that the network finds wrong.

    Raises:
        ValueError: q outside (0, 1].
    """
    if not 0 < q <= 1:
        raise ValueError(f"q must lie in (0, 1], got {q}")

    def rows(logits: Tensor, target: Tensor) -> Tensor:
        if q == 1:
            return 1 - _label_probability(logits, target)
        log_p = -F.cross_entropy(logits, target, reduction="none")
        return -torch.expm1(q * log_p) / q  # no 0^q, whose derivative at 0 is infinite

    def slope(logits: Tensor, target: Tensor) -> Tensor:
        p = _label_probability(logits, target)
        return p**q * (1 - p)

    name = "mean absolute error" if q == 1 else f"generalized cross-entropy (q = {q:g})"
    return Loss(name, rows, slope)


def linear_core_entry(core: float = 1.0, scale: float = 1.0, tail: str = "exponential") -> Loss:
    """The constrained Linear-Core loss with these parameters, as an entry for ``LOSSES``."""
    surrogate = LinearCore(core, scale, tail)

    def rows(logits: Tensor, target: Tensor) -> Tensor:
        return linear_core_loss(logits, target, core=core, scale=scale, tail=tail, reduction="none")

    def slope(logits: Tensor, target: Tensor) -> Tensor:
        return -surrogate.derivative(-_strongest_wrong(logits, target))

    return Loss(f"linear core ({tail})", rows, slope)


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss("cross-entropy", _cross_entropy_rows, _cross_entropy_slope),
    "generalized_cross_entropy": generalized_cross_entropy_entry(),
    "mean_absolute_error": generalized_cross_entropy_entry(q=1.0),
    "hinge": Loss("constrained hinge", _hinge_rows, _hinge_slope),
    "linear_core": linear_core_entry(),
    "linear_core_gamma": linear_core_entry(tail="gamma"),
    "linear_core_logistic": linear_core_entry(tail="logistic"),
}


def find_loss(loss: str | Loss) -> Loss:
    """A loss of ``LOSSES`` by its key; a ``Loss`` is returned as it is.

    Raises:
        ValueError: an unknown key.
    """
    if isinstance(loss, Loss):
        return loss
    if loss not in LOSSES:
        raise ValueError(f"loss must be one of {sorted(LOSSES)} or a Loss, got {loss!r}")
    return LOSSES[loss]


def gradient_magnitudes(logits: Tensor, target: Tensor, loss: str | Loss) -> Tensor:
    """Norm of each sample's gradient with respect to its own logits: ``[n]``.

    Args:
        logits: ``[n, K]``.
        target: ``[n]`` the labels the loss sees (noisy ones, if they are).
        loss: a key of ``LOSSES``, or a ``Loss``.
    """
    leaf = logits.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(find_loss(loss).rows(leaf, target).sum(), leaf)
    return gradient.norm(dim=1)


def margin_slopes(logits: Tensor, target: Tensor, loss: str | Loss) -> Tensor:
    """``|ℓ'|`` of each sample at its strongest wrong class, in [0, 1]: ``[n]``.

    One scale for all losses: how hard a sample still pulls. Cross-entropy as a function of the
    log-odds of the label has ``|ℓ'| = 1 - p_y``, which reaches 1 only in the limit. The constrained
    losses have ``-Φ'(-h̃_{y'})`` at the wrong class ``y'`` with the largest score, which is exactly
    1 in the core.
    """
    return find_loss(loss).slope(logits.detach(), target)


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How a run is trained; the same for every loss.

    Attributes:
        hidden: units of the hidden layer.
        epochs: passes over the training set.
        batch_size: samples a step.
        momentum: of stochastic gradient descent.
        lr_grid: learning rates to choose from.
    """

    hidden: int = 64
    epochs: int = 8
    batch_size: int = 100
    momentum: float = 0.9
    lr_grid: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)

    def __post_init__(self) -> None:
        for name in ("hidden", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.epochs < 0:
            raise ValueError(f"epochs must not be negative, got {self.epochs}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}")
        if not self.lr_grid or not all(math.isfinite(lr) and lr > 0 for lr in self.lr_grid):
            raise ValueError(f"lr_grid must hold positive numbers, got {self.lr_grid}")


@dataclass(frozen=True)
class Ensemble:
    """R independent two-layer perceptrons: ``weights`` are ``[R, d, H]``, ``[R, 1, H]``,
    ``[R, H, K]``, ``[R, 1, K]``."""

    weights: tuple[Tensor, Tensor, Tensor, Tensor]

    def __len__(self) -> int:
        return len(self.weights[0])

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """``[R, n, K]`` scores of ``x`` ``[n, d]``, in blocks: R copies of x would not fit."""
        blocks = (_scores(self.weights, b.expand(len(self), *b.shape)) for b in x.split(4096))
        return torch.cat(list(blocks), dim=1)

    def accuracies(self, x: Tensor, y: Tensor) -> Tensor:
        """``[R]`` fractions of ``x`` ``[n, d]`` classified as ``y``, ``[n]`` or ``[R, n]``."""
        return (self.logits(x).argmax(2) == y).double().mean(1)

    def member(self, index: int) -> nn.Sequential:
        """One perceptron as an ordinary torch module, on copies of its weights."""
        w1, b1, w2, b2 = (w[index].detach() for w in self.weights)
        # skip_init: nn.Linear's own initialisation would move torch's global generator
        layers = [skip_init(nn.Linear, *w.shape, dtype=w.dtype) for w in (w1, w2)]
        with torch.no_grad():
            for layer, w, b in zip(layers, (w1, w2), (b1, b2), strict=True):
                layer.weight.copy_(w.T)
                layer.bias.copy_(b[0])
        return nn.Sequential(layers[0], nn.ReLU(), layers[1])


def _scores(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """``[R, B, d]`` to ``[R, B, K]``."""
    w1, b1, w2, b2 = weights
    return torch.baddbmm(b2, torch.baddbmm(b1, x, w1).relu_(), w2)


def _initial(sizes: tuple[int, int, int], generator: torch.Generator, dtype: Any) -> list[Tensor]:
    """``nn.Linear``'s initial law: uniform within ± 1/√fan-in, weights and biases."""
    d, hidden, k = sizes

    def draw(fan_in: int, *shape: int) -> Tensor:
        bound = 1 / math.sqrt(fan_in)
        return torch.empty(shape, dtype=dtype).uniform_(-bound, bound, generator=generator)

    return [draw(d, d, hidden), draw(d, 1, hidden), draw(hidden, hidden, k), draw(hidden, 1, k)]


def train_ensemble(
    x: Tensor,
    labels: Tensor,
    *,
    loss: str | Loss,
    learning_rates: Sequence[float],
    seeds: Sequence[int],
    recipe: Recipe,
    n_classes: int,
) -> Ensemble:
    """Train R perceptrons side by side.

    Args:
        x: ``[n, d]`` features, floating point, shared by all members.
        labels: ``[R, n]`` int64 labels, one row a member.
        loss: a key of ``LOSSES``, or a ``Loss``.
        learning_rates: R positive numbers.
        seeds: R seeds; each draws a member's initial weights, then its batch orders. Members with
            equal seeds start alike and see the same batches.
        recipe: everything else; its ``lr_grid`` is not used here.
        n_classes: K.

    Returns:
        The trained ensemble. Equal arguments give equal weights on one thread; torch's global
        generator is neither used nor moved.

    Raises:
        ValueError: shapes that do not fit together.
    """
    rows = find_loss(loss).rows
    members, n = _check_ensemble(x, labels, learning_rates, seeds)
    generators = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
    sizes = (x.shape[1], recipe.hidden, n_classes)
    starts = [_initial(sizes, generator, x.dtype) for generator in generators]
    weights = [torch.stack(parts).requires_grad_() for parts in zip(*starts, strict=True)]
    speeds = [torch.zeros_like(w) for w in weights]
    rates = torch.tensor(learning_rates, dtype=x.dtype)[:, None, None]
    for _ in range(recipe.epochs):
        order = torch.stack([torch.randperm(n, generator=g) for g in generators])  # [R, n]
        for batch in order.split(recipe.batch_size, dim=1):  # [R, B]
            scores = _scores(weights, x[batch]).flatten(0, 1)  # [R·B, K]
            each = rows(scores, labels.gather(1, batch).flatten())
            objective = each.reshape(members, -1).mean(1).sum()  # members do not interact
            gradients = torch.autograd.grad(objective, weights)
            _step(weights, speeds, gradients, rates, recipe.momentum)
    w1, b1, w2, b2 = (w.detach() for w in weights)
    return Ensemble((w1, b1, w2, b2))


def _check_ensemble(
    x: Tensor, labels: Tensor, learning_rates: Sequence[float], seeds: Sequence[int]
) -> tuple[int, int]:
    members = len(seeds)
    if x.dim() != 2 or not x.is_floating_point() or not len(x):
        raise ValueError(f"x must be a floating [n, d] with n ≥ 1, got {tuple(x.shape)} {x.dtype}")
    if labels.shape != (members, len(x)):
        raise ValueError(
            f"labels must be [R, n] = {(members, len(x))} for {members} seeds and {len(x)} "
            f"samples, got {tuple(labels.shape)}"
        )
    if len(learning_rates) != members:
        raise ValueError(
            f"learning_rates must hold one rate a seed ({members}), got {len(learning_rates)}"
        )
    return members, len(x)


@torch.no_grad()
def _step(
    weights: Sequence[Tensor],
    speeds: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rates: Tensor,
    momentum: float,
) -> None:
    """``v ← μ·v + g``, ``w ← w - lr·v``: as ``torch.optim.SGD``, with a rate for each member."""
    for w, v, g in zip(weights, speeds, gradients, strict=True):
        v.mul_(momentum).add_(g)
        w.addcmul_(v, rates, value=-1)


def train_classifier(
    x: np.ndarray | Tensor,
    y: np.ndarray | Tensor,
    *,
    loss: str | Loss,
    lr: float,
    seed: int,
    hidden: int = 64,
    epochs: int = 8,
    batch_size: int = 100,
    momentum: float = 0.9,
    n_classes: int | None = None,
) -> nn.Sequential:
    """Train one perceptron; the same as a member of ``train_ensemble``.

    Args:
        x: ``[n, ...]`` features, flattened; float64 stays float64, all else becomes float32.
        y: ``[n]`` integer labels.
        loss: a key of ``LOSSES``, or a ``Loss``.
        lr: learning rate.
        seed: of initial weights and batch order.
        hidden: units of the hidden layer.
        epochs: passes over the data; 0 returns the initial network.
        batch_size: samples a step.
        momentum: of stochastic gradient descent.
        n_classes: K; by default one more than the largest label.

    Returns:
        ``nn.Sequential(Linear, ReLU, Linear)``.
    """
    recipe = Recipe(hidden, epochs, batch_size, momentum, (lr,))
    features, labels = _features(x), torch.as_tensor(y).long()
    return train_ensemble(
        features,
        labels[None],
        loss=loss,
        learning_rates=[lr],
        seeds=[seed],
        recipe=recipe,
        n_classes=n_classes or int(labels.max()) + 1,
    ).member(0)


def _features(x: np.ndarray | Tensor) -> Tensor:
    tensor = torch.as_tensor(x)
    flat = tensor.reshape(len(tensor), -1)
    return flat if flat.dtype == torch.float64 else flat.float()


# --- the comparison -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LearningRateChoice:
    """How a learning rate was chosen.

    Attributes:
        loss: key of the loss.
        rate: label noise it was chosen under.
        lr: the chosen learning rate.
        accuracies: validation accuracy (on noisy labels, mean over the selection seeds) of each
            rate of the grid.
    """

    loss: str
    rate: float
    lr: float
    accuracies: Mapping[float, float]

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the smallest or largest, so that the grid is too narrow."""
        return self.lr in (min(self.accuracies), max(self.accuracies))


@dataclass(frozen=True)
class Run:
    """One trained network of the comparison.

    Attributes:
        loss: key of the loss.
        rate: target rate of the label noise.
        seed: of noise, initial weights and batch order.
        shuffled: whether the labels were permuted, which destroys what there is to learn.
        lr: learning rate.
        flipped: fraction of training labels that differ from the clean ones.
        accuracy: on the test set, with its clean labels.
        fit: accuracy on the training labels as they were given, noise and all.
    """

    loss: str
    rate: float
    seed: int
    shuffled: bool
    lr: float
    flipped: float
    accuracy: float
    fit: float


@dataclass(frozen=True)
class Comparison:
    """Every run, and how each learning rate was chosen."""

    runs: tuple[Run, ...]
    choices: tuple[LearningRateChoice, ...]

    def accuracies(self, loss: str, rate: float) -> np.ndarray:
        """Test accuracies of one loss and noise rate, in the order of the seeds: ``[S]``.

        Pair them by position: two losses with the same seed saw the same noisy labels.

        Raises:
            KeyError: no such runs.
        """
        found = [run.accuracy for run in self.runs if (run.loss, run.rate) == (loss, rate)]
        if not found:
            raise KeyError(f"no runs of {loss!r} at noise {rate}")
        return np.array(found)

    def chosen(self, rate: float) -> dict[str, float]:
        """Learning rate of each loss at one noise rate."""
        return {choice.loss: choice.lr for choice in self.choices if choice.rate == rate}


def standardise(x_train: np.ndarray, x_test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Flatten to ``[n, d]`` float64 and scale by the training set's mean and deviation.

    Double precision, so that accuracies agree across machines: in single precision the last digits
    of a matrix product depend on the processor, and training amplifies them. One mean and one
    deviation over all pixels, so pictures keep their contrast.

    Raises:
        ValueError: constant or non-finite features.
    """
    parts = [np.asarray(x, dtype=np.float64).reshape(len(x), -1) for x in (x_train, x_test)]
    mean, deviation = float(parts[0].mean()), float(parts[0].std())
    if not (math.isfinite(mean) and math.isfinite(deviation) and deviation > 0):
        raise ValueError("x_train must be finite and not constant")
    train, test = ((part - mean) / deviation for part in parts)
    return train, test


def average_pool(images: np.ndarray, factor: int) -> np.ndarray:
    """Means over ``factor × factor`` squares: ``[n, H, W]`` to ``[n, H/factor, W/factor]``.

    Raises:
        ValueError: ``images`` is no ``[n, H, W]``, or ``factor`` does not divide H and W.
    """
    if images.ndim != 3 or factor < 1 or any(side % factor for side in images.shape[1:]):
        raise ValueError(f"factor={factor} must divide the sides of images {images.shape}")
    n, height, width = images.shape
    squares = images.reshape(n, height // factor, factor, width // factor, factor)
    return squares.mean(axis=(2, 4), dtype=np.float64)


def choose_learning_rate(
    x: np.ndarray,
    noisy: Mapping[int, np.ndarray],
    *,
    loss: str,
    rate: float,
    recipe: Recipe,
    n_classes: int,
    validation: float = 0.2,
) -> LearningRateChoice:
    """Choose a loss's learning rate by its accuracy on held-out *noisy* labels.

    Clean labels are never seen, as in practice. Every loss gets the same grid, splits and budget.

    Args:
        x: ``[n, d]`` standardised training features.
        noisy: for each selection seed, the ``[n]`` labels under its noise. The seed also draws
            split, initial weights and batches; keep it apart from the seeds of the final runs.
        loss: key of the loss.
        rate: noise rate, recorded only.
        recipe: how to train, and the grid.
        n_classes: K.
        validation: fraction held out.
    """
    grid = recipe.lr_grid
    scores = []
    for seed, labels in noisy.items():
        order = np.random.default_rng(seed).permutation(len(x))
        held, kept = np.split(order, [round(validation * len(x))])
        ensemble = train_ensemble(
            torch.from_numpy(x[kept]),
            torch.from_numpy(labels[kept]).expand(len(grid), -1),
            loss=loss,
            learning_rates=grid,
            seeds=[seed] * len(grid),
            recipe=recipe,
            n_classes=n_classes,
        )
        scores.append(
            ensemble.accuracies(torch.from_numpy(x[held]), torch.from_numpy(labels[held])).numpy()
        )
    means = dict(zip(grid, np.mean(scores, axis=0).tolist(), strict=True))
    return LearningRateChoice(loss, rate, max(means, key=lambda lr: (means[lr], -lr)), means)


def compare_losses(
    x_train: np.ndarray,
    y_train: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
    *,
    losses: Sequence[str] = ("cross_entropy", "hinge", "linear_core"),
    rates: Sequence[float] = (0.0, 0.4),
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    recipe: Recipe | None = None,
    selection_seeds: Sequence[int] = (1000, 1001),
    learning_rates: Mapping[str, float] | None = None,
    shuffle_labels: bool = False,
) -> Comparison:
    """Test accuracy of each loss, at each noise rate, for each seed.

    For every (rate, seed) one set of noisy labels is drawn and shared by all losses, so results
    pair by seed. Learning rates are chosen per loss and rate on noisy validation labels with
    seeds of their own, then the full training set is used. Test labels are clean throughout.

    Args:
        x_train: ``[n, ...]`` features; standardised here with the training set's numbers.
        y_train: ``[n]`` clean integer labels.
        x_test: ``[m, ...]`` features.
        y_test: ``[m]`` clean labels.
        losses: keys of ``LOSSES``.
        rates: target rates of instance-dependent noise.
        seeds: of the final runs.
        recipe: how to train; ``Recipe()`` by default.
        selection_seeds: of the learning-rate choice; none may be among ``seeds``.
        learning_rates: rates by loss, for all noise levels; skips the choice.
        shuffle_labels: the control: permute the (noisy) training labels, so that accuracy must
            fall to chance, whatever the loss. Needs ``learning_rates``: there is nothing to choose
            by.

    Returns:
        All runs in the order (rate, loss, seed), and the choices.

    Raises:
        ValueError: unknown losses, no or repeated seeds, seeds used twice, shapes that differ.
    """
    recipe = recipe or Recipe()
    _check_comparison(losses, seeds, selection_seeds, learning_rates, shuffle_labels)
    data = _Data.standardised(x_train, y_train, x_test, y_test)
    runs: list[Run] = []
    choices: list[LearningRateChoice] = []
    with _progress(len(rates) * len(losses), "losses × noise rates") as bar:
        for rate in rates:
            noisy = {seed: data.labels(rate, seed, shuffle_labels) for seed in seeds}
            trial = {seed: data.labels(rate, seed, False) for seed in selection_seeds}
            for loss in losses:
                if learning_rates is None:
                    choices.append(data.choose(trial, loss, rate, recipe))
                lr = choices[-1].lr if learning_rates is None else learning_rates[loss]
                found = data.train(noisy, loss, lr, recipe)
                runs += [Run(loss, rate, seed, shuffle_labels, lr, *row) for seed, *row in found]
                bar.update()
    return Comparison(tuple(runs), tuple(choices))


@dataclass(frozen=True)
class _Data:
    """The arrays of a comparison: ``x`` standardised, labels clean, K classes."""

    x: np.ndarray  # [n, d]
    y: np.ndarray  # [n]
    x_test: np.ndarray  # [m, d]
    y_test: np.ndarray  # [m]
    k: int

    @classmethod
    def standardised(
        cls, x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray
    ) -> _Data:
        train, test = standardise(x_train, x_test)
        y, clean = (np.asarray(part).astype(np.int64) for part in (y_train, y_test))
        if len(y) != len(train) or len(clean) != len(test):
            raise ValueError(
                f"labels must match features: {len(y)} for {len(train)} training samples, "
                f"{len(clean)} for {len(test)} test samples"
            )
        return cls(train, y, test, clean, int(max(y.max(), clean.max())) + 1)

    def labels(self, rate: float, seed: int, shuffle: bool) -> np.ndarray:
        """``[n]`` noisy labels; the permutation of the control has a stream of its own."""
        noisy, _ = instance_dependent_noise(self.x, self.y, rate, self.k, seed)
        return np.random.default_rng([seed, 1]).permutation(noisy) if shuffle else noisy

    def choose(
        self, trial: Mapping[int, np.ndarray], loss: str, rate: float, recipe: Recipe
    ) -> LearningRateChoice:
        return choose_learning_rate(
            self.x, trial, loss=loss, rate=rate, recipe=recipe, n_classes=self.k
        )

    def train(
        self, noisy: Mapping[int, np.ndarray], loss: str, lr: float, recipe: Recipe
    ) -> list[tuple[int, float, float, float]]:
        """``(seed, flipped, accuracy, fit)`` of one network a seed."""
        x, labels = torch.from_numpy(self.x), torch.from_numpy(np.stack(list(noisy.values())))
        ensemble = train_ensemble(
            x,
            labels,
            loss=loss,
            learning_rates=[lr] * len(noisy),
            seeds=list(noisy),
            recipe=recipe,
            n_classes=self.k,
        )
        flipped = [float(np.mean(row != self.y)) for row in noisy.values()]
        test = ensemble.accuracies(torch.from_numpy(self.x_test), torch.from_numpy(self.y_test))
        fit = ensemble.accuracies(x, labels)
        return list(zip(noisy, flipped, test.tolist(), fit.tolist(), strict=True))


def slope_samples(
    x_train: np.ndarray,
    y_train: np.ndarray,
    *,
    learning_rates: Mapping[str, float],
    rate: float,
    seed: int,
    recipe: Recipe,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """How hard clean and flipped samples still pull after training: one network a loss.

    Args:
        x_train: ``[n, ...]`` features.
        y_train: ``[n]`` clean integer labels.
        learning_rates: rate by key of the loss; its keys are the losses.
        rate: target rate of instance-dependent noise, above 0.
        seed: of noise, initial weights and batch order, as in ``compare_losses``.
        recipe: how to train.

    Returns:
        For each loss, ``margin_slopes`` of the samples with clean and with flipped labels.
    """
    x, _ = standardise(x_train, x_train[:1])
    y = np.asarray(y_train).astype(np.int64)
    noisy, _ = instance_dependent_noise(x, y, rate, int(y.max()) + 1, seed)
    given = torch.from_numpy(noisy)
    found = {}
    for loss, lr in learning_rates.items():
        ensemble = train_ensemble(
            torch.from_numpy(x),
            given[None],
            loss=loss,
            learning_rates=[lr],
            seeds=[seed],
            recipe=recipe,
            n_classes=int(y.max()) + 1,
        )
        slopes = margin_slopes(ensemble.logits(torch.from_numpy(x))[0], given, loss).numpy()
        found[loss] = slopes[noisy == y], slopes[noisy != y]
    return found


def _check_comparison(
    losses: Iterable[str],
    seeds: Sequence[int],
    selection_seeds: Sequence[int],
    learning_rates: Mapping[str, float] | None,
    shuffle_labels: bool,
) -> None:
    for loss in losses:
        find_loss(loss)
        if learning_rates is not None and loss not in learning_rates:
            raise ValueError(f"learning_rates must give a rate for {loss!r}")
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds must be distinct, at least one, got {list(seeds)}")
    if learning_rates is None and shuffle_labels:
        raise ValueError("shuffle_labels needs learning_rates: shuffled labels choose nothing")
    if learning_rates is None and (not selection_seeds or set(seeds) & set(selection_seeds)):
        raise ValueError("selection_seeds must be given, and none may be among seeds")


def _progress(total: int, what: str) -> Any:
    from tqdm import tqdm  # tqdm.auto would warn on stderr in a kernel without ipywidgets

    return tqdm(total=total, desc=what, disable=None)  # silent where nobody watches
