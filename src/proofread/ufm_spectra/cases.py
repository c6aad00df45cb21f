"""The networks of the chapter's pages: what is trained beside what, and which layers matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

from .collapse import collapse_metrics
from .directions import collapse_directions
from .eigensolvers import Eigenpairs, SpectralDensity, spectral_density, top_eigenpairs
from .model import UnconstrainedFeatureModel
from .networks import HEAD, Checkpoint, Recipe, cnn, head_layers, later_layers, mlp, train_networks
from .operators import CurvatureOperator, hessian, layer_hessian
from .optimum import collapsed_optimum
from .study import LayerStudy, NetworksStudy, study_layer, study_networks


@dataclass(frozen=True)
class Case:
    """Networks of several seeds after some epochs, with the data that they were trained on.

    Attributes:
        checkpoint: the networks and how well they fit.
        recipe: how they were trained.
        x: ``[N, …]`` inputs.
        y: ``[N]`` the labels of the training.
        layers: names of the layers that are studied.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    x: Tensor
    y: Tensor
    layers: tuple[str, ...]

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """One a seed."""
        return self.checkpoint.networks

    @property
    def head(self) -> list[str]:
        """Names of the head's layers."""
        return head_layers(self.networks[0])

    def nc1(self, network: nn.Module, layer: str) -> float:
        """NC1 of what a layer of one of the networks reads."""
        return collapse_metrics(layer_input(network, layer, self.x), self.y).nc1

    def predicted_outlier(self, network: nn.Module) -> float:
        """``λγ/(1 − γ)`` with γ the mean output of a sample's own class."""
        with torch.no_grad():
            gain = float(network(self.x).gather(1, self.y[:, None]).mean())
        return self.recipe.weight_decay * gain / (1 - gain)


def layer_input(network: nn.Module, layer: str, x: Tensor) -> Tensor:
    """What a layer reads, flattened: ``[N, …]``."""
    seen: list[Tensor] = []
    module = network.get_submodule(layer)
    hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        with torch.no_grad():
            network(x)
    finally:
        hook.remove()
    return seen[0].flatten(1)


def train_perceptrons(
    x: Tensor,
    y: Tensor,
    shuffled: Tensor,
    recipes: tuple[Recipe, Recipe],
    *,
    seeds: Sequence[int],
    width: int = 48,
    checkpoints: Sequence[int] = (4,),
) -> dict[str, Case]:
    """Train perceptrons with a linear head, and their controls; the heads are studied.

    Args:
        x: ``[N, d]`` inputs.
        y: ``[N]`` their classes.
        shuffled: ``[N]`` the same labels in another order.
        recipes: for the labels and for the shuffled ones.
        seeds: of the initial weights.
        width: of all layers but the last.
        checkpoints: epochs after which the networks are kept on the way.

    Returns:
        ``"linear head"``, ``"linear head, epoch …"`` for each checkpoint, and ``"random labels"``.
    """
    make = _perceptron(x, y, width)
    cases = _train("linear head", make, x, y, recipes[0], seeds, checkpoints)
    return cases | _train("random labels", make, x, shuffled, recipes[1], seeds)


def train_heads(
    x: Tensor, y: Tensor, recipe: Recipe, *, seeds: Sequence[int], width: int = 48
) -> dict[str, Case]:
    """Train perceptrons with a linear and with a ReLU head; all layers but the first are studied.

    Arguments as for :func:`train_perceptrons`.
    """
    cases = _train("linear head", _perceptron(x, y, width), x, y, recipe, seeds)
    cases |= _train("ReLU head", _perceptron(x, y, width, relu=True), x, y, recipe, seeds)
    return {
        name: replace(case, layers=tuple(later_layers(case.networks[0])))
        for name, case in cases.items()
    }


def _perceptron(x: Tensor, y: Tensor, width: int, relu: bool = False) -> Callable[[int], nn.Module]:
    sizes = {"body": (width, width), "head": (width, width), "relu_head": relu}
    return partial(_seeded, mlp, x.shape[1], int(y.max()) + 1, sizes)


def train_convolutional(
    x: Tensor,
    y: Tensor,
    recipe: Recipe,
    *,
    seeds: Sequence[int],
    width: int = 48,
    checkpoints: Sequence[int] = (5,),
) -> dict[str, Case]:
    """Train the convolutional network with a linear head, on square pictures.

    Arguments as for :func:`train_perceptrons`. The networks are kept at each of the checkpoints,
    by names that end in the epoch, and at the end. The head alone is studied.
    """
    sizes = {"body": (width,), "head": (width, width)}
    make = partial(_seeded, cnn, round(x.shape[1] ** 0.5), int(y.max()) + 1, sizes)
    return _train("convolutional", make, x, y, recipe, seeds, checkpoints)


def train_perceptron(
    x: Tensor, y: Tensor, recipe: Recipe, *, seeds: Sequence[int], width: int, relu: bool = False
) -> Case:
    """One kind of perceptron at the end of its training; its head is studied."""
    make = _perceptron(x, y, width, relu)
    return _train("", make, x, y, recipe, seeds)[""]


def _train(name, make, x, y, recipe, seeds, marks=()):  # type: ignore[no-untyped-def]
    """The checkpoints of one training by name; the head is what is studied."""
    training = train_networks(make, x, y, recipe, seeds, checkpoints=marks)
    cases = {}
    for checkpoint in training.checkpoints:
        final = checkpoint is training.final
        full_name = name if final else f"{name}, epoch {checkpoint.epoch}"
        layers = tuple(head_layers(checkpoint.networks[0]))
        cases[full_name] = Case(checkpoint, recipe, x, y, layers)
    return cases


def _seeded(make, n_inputs, n_classes, options, seed):  # type: ignore[no-untyped-def]
    return make(n_inputs, n_classes, **options, seed=seed)


def study_cases(cases: Mapping[str, Case]) -> dict[str, NetworksStudy]:
    """Study the layers of every case."""
    return {
        name: study_networks(case.networks, case.layers, case.x, case.y, case.recipe.loss)
        for name, case in cases.items()
    }


def over_head(study: NetworksStudy, name: str) -> NDArray[np.float64]:
    """A measured quantity over the layers of the head: ``[seeds, layers]``."""
    chosen = [at for at, layer in enumerate(study.layers) if layer.startswith(HEAD)]
    return study.values(name)[:, chosen]


def model_residual(n_classes: int, width: int) -> float:
    """``residual_single`` at the linear model's optimum, worst of three layers, nine decimals."""
    return round(max(study.residual_single for study in _model_studies(n_classes, width)), 9)


def model_gap(n_classes: int, width: int) -> float:
    """``λ_{K²} / λ_{K²+1}`` at the linear model's optimum, worst of three layers, cut at 10⁶."""
    return min(1e6, *(study.gap for study in _model_studies(n_classes, width)))


def _model_studies(n_classes: int, width: int) -> list[LayerStudy]:
    optimum = collapsed_optimum(n_classes, 5, 3, 1e-3, 1e-3, width)
    model = UnconstrainedFeatureModel(n_classes, 5, 3, width)
    model.load_optimum(optimum, seed=0)
    x, y = model.features.detach(), model.targets()
    return [study_layer(model, f"layers.{number}", x, y) for number in range(3)]


@dataclass(frozen=True)
class Progress:
    """What the head's layers show along training.

    Attributes:
        epochs: ``[C]`` epochs trained.
        nc1: ``[C, S, L]`` of what each layer of the head reads.
        overlap: ``[C, S, L]``.
        gap: ``[C, S, L]``.
    """

    epochs: NDArray[np.int64]
    nc1: NDArray[np.float64]
    overlap: NDArray[np.float64]
    gap: NDArray[np.float64]


def progress_of(cases: Mapping[str, Case], studies: Mapping[str, NetworksStudy]) -> Progress:
    """Line up studies of one training's checkpoints by epoch."""
    order = sorted(cases, key=lambda name: cases[name].checkpoint.epoch)
    epochs = np.array([cases[name].checkpoint.epoch for name in order])
    columns = [np.stack([over_head(studies[name], q) for name in order]) for q in PROGRESS]
    return Progress(epochs, *columns)


PROGRESS = ("nc1", "overlap", "gap")


class SolverRun(NamedTuple):
    """What it took to find K² eigenpairs of a layer Hessian.

    - ``case``: name of the networks
    - ``start``: ``"random"``, ``"class means"`` or ``"SciPy eigsh"``
    - ``applications``: columns multiplied
    - ``residual``: largest ``‖Hv − λv‖ / λ_1``, of the vectors returned
    - ``unresolved``: whether the solver says that K² cuts through a cluster; None for SciPy
    """

    case: str
    start: str
    applications: int
    residual: float
    unresolved: bool | None


def solver_runs(cases: Mapping[str, Case], layer: str, tol: float = 1e-3) -> list[SolverRun]:
    """Top K² eigenpairs of one layer Hessian of each case's first network, by three routes."""
    runs = []
    for name, case in cases.items():
        arguments = (case.networks[0], layer, case.x, case.y)
        k = (int(case.y.max()) + 1) ** 2
        means = collapse_directions(*arguments, allow_deficient=True)
        for start, vectors in (("random", None), ("class means", means)):
            operator = layer_hessian(*arguments, case.recipe.loss)
            pairs = top_eigenpairs(operator, k, start=vectors, tol=tol)
            found = (operator.applications, _residual(operator, pairs.values, pairs.vectors))
            runs.append(SolverRun(name, start, *found, pairs.unresolved))
        operator = layer_hessian(*arguments, case.recipe.loss)
        v0 = np.random.default_rng(0).standard_normal(operator.shape[0])
        values, found_vectors = eigsh(operator.to_scipy(), k=k, which="LM", v0=v0)
        spent = operator.applications
        vectors = torch.from_numpy(found_vectors)
        residual = _residual(operator, torch.from_numpy(values), vectors)
        runs.append(SolverRun(name, "SciPy eigsh", spent, residual, None))
    return runs


def _residual(operator: CurvatureOperator, values: Tensor, vectors: Tensor) -> float:
    image = operator.matmat(vectors)
    return float((image - values * vectors).norm(dim=0).max() / values.abs().max())


def full_spectrum(case: Case, k: int) -> tuple[Eigenpairs, SpectralDensity]:
    """Top k eigenpairs of the Hessian over all weights of the first network, and the density of the
    rest."""
    operator = hessian(case.networks[0], case.x, case.y, case.recipe.loss)
    pairs = top_eigenpairs(operator, k, which="LA", block_size=4)
    return pairs, spectral_density(operator, n_probes=4, steps=40, deflate=pairs)
