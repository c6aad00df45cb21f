"""The networks of the chapter's pages: what is trained beside what, and which layers matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .collapse import collapse_metrics
from .networks import HEAD, Checkpoint, Recipe, cnn, head_layers, later_layers, mlp, train_networks
from .study import NetworksStudy, study_networks


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
    recipe: Recipe,
    *,
    seeds: Sequence[int],
    width: int = 48,
    early: int = 4,
) -> dict[str, Case]:
    """Train the perceptrons that the networks page compares.

    Args:
        x: ``[N, d]`` inputs.
        y: ``[N]`` their classes.
        shuffled: ``[N]`` the same labels in another order.
        recipe: the same for all.
        seeds: of the initial weights.
        width: of all layers but the last.
        early: epochs after which the linear head is kept as a control.

    Returns:
        by name: the linear head, early and at the end, the ReLU head, and the linear head on
        shuffled labels. In the two controls the head alone is studied, in the others all layers
        but the first.
    """
    sizes = {"body": (width, width), "head": (width, width)}
    n_classes = int(y.max()) + 1
    linear = partial(_seeded, mlp, x.shape[1], n_classes, sizes)
    relu = partial(_seeded, mlp, x.shape[1], n_classes, sizes | {"relu_head": True})
    cases = _train("linear head", linear, x, y, recipe, seeds, [early])
    cases |= _train("ReLU head", relu, x, y, recipe, seeds, [])
    return cases | _train("random labels", linear, x, shuffled, recipe, seeds, [], control=True)


def train_convolutional(
    x: Tensor, y: Tensor, recipe: Recipe, *, seeds: Sequence[int], width: int = 48, early: int = 5
) -> dict[str, Case]:
    """Train the convolutional network with a linear head; arguments and result as for
    :func:`train_perceptrons`, with square pictures as inputs."""
    sizes = {"body": (width,), "head": (width, width)}
    make = partial(_seeded, cnn, round(x.shape[1] ** 0.5), int(y.max()) + 1, sizes)
    return _train("convolutional", make, x, y, recipe, seeds, [early])


def _train(name, make, x, y, recipe, seeds, marks, control=False):  # type: ignore[no-untyped-def]
    """The checkpoints of one training, earlier ones as controls."""
    training = train_networks(make, x, y, recipe, seeds, checkpoints=marks)
    cases = {}
    for checkpoint in training.checkpoints:
        final = checkpoint is training.final
        chosen = later_layers if final and not control else head_layers
        layers = tuple(chosen(checkpoint.networks[0]))
        cases[name if final else f"{name}, early"] = Case(checkpoint, recipe, x, y, layers)
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
