"""Small classifiers and their training, many seeds at once.

A network is a body of layers with ReLU and a head of linear layers, with ReLU between them or
without. With a linear head the theory of deep linear networks on free features is about the head
as it stands; with a ReLU head the same layers pass a ReLU.

The networks of several seeds are stacked and trained together: they share the data and their order,
and differ in the initial weights alone.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import skip_init

HEAD = "head"  # the names of a head's layers begin with it

# --- data -----------------------------------------------------------------------------------------


def class_subset(
    images: Tensor, labels: Tensor, n_per_class: int, pool: int = 2
) -> tuple[Tensor, Tensor]:
    """The first images of each class, pooled, flattened and centred.

    Args:
        images: ``[N, side, side]``, any real dtype; scale them before.
        labels: ``[N]`` integer classes.
        n_per_class: n, of each class.
        pool: side of the squares that are averaged to one pixel; must divide ``side``.

    Returns:
        ``x [K·n, (side/pool)²]`` in float64 with mean 0 over the images, class by class, and
        ``y [K·n]``.

    Raises:
        ValueError: a class with fewer than n images, or a side that ``pool`` does not divide.
    """
    if images.ndim != 3 or images.shape[1] % pool or images.shape[2] % pool:
        shape = list(images.shape)
        raise ValueError(f"images must be [N, side, side] with sides divisible by {pool}: {shape}")
    rows = [(labels == c).nonzero()[:n_per_class, 0] for c in range(int(labels.max()) + 1)]
    if n_per_class < 1 or min(map(len, rows)) < n_per_class:
        least = min(map(len, rows))
        raise ValueError(f"n_per_class={n_per_class} must lie in 1 … {least}, the smallest class")
    order = torch.cat(rows)
    x = F.avg_pool2d(images[order].double()[:, None], pool).flatten(1)
    return x - x.mean(0), labels[order].long()


# --- networks -------------------------------------------------------------------------------------


def mlp(
    n_inputs: int,
    n_classes: int,
    *,
    body: Sequence[int] = (48, 48),
    head: Sequence[int] = (48, 48),
    relu_head: bool = False,
    seed: int = 0,
) -> nn.Sequential:
    """A perceptron without biases, in float64, with He's initial weights.

    The body's layers ``body1, body2, …`` end in a ReLU each. The head has one layer more than
    ``head`` has widths, ``head1, head2, …``, the last onto the classes; with ``relu_head`` a ReLU
    stands between them, and the names and the initial weights stay the same.

    Args:
        n_inputs: length of an input.
        n_classes: K.
        body: widths of the body's layers.
        head: widths between the head's layers.
        relu_head: put a ReLU between the head's layers.
        seed: of the initial weights, normal with variance 2 / fan-in (He et al. 2015).

    Raises:
        ValueError: a size below 1, or an empty body.
    """
    _check_sizes(n_inputs=[n_inputs], n_classes=[n_classes], body=body, head=head)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (fan_in, width) in enumerate(pairwise([n_inputs, *body]), 1):
        layers[f"body{number}"] = _linear(fan_in, width)
        layers[f"relu{number}"] = nn.ReLU()
    layers.update(_head_layers([body[-1], *head, n_classes], relu_head))
    return _initialised(layers, seed)


def cnn(
    side: int,
    n_classes: int,
    *,
    channels: Sequence[int] = (8, 16),
    strides: Sequence[int] = (3, 2),
    body: Sequence[int] = (48,),
    head: Sequence[int] = (48, 48),
    relu_head: bool = False,
    seed: int = 0,
) -> nn.Sequential:
    """A small convolutional network like :func:`mlp`, for flat images ``[N, side²]``.

    The body begins with 3 × 3 convolutions ``conv1, conv2, …``, padded by 1, a ReLU after each; the
    rest, on all channels and places, is a perceptron.

    Args:
        side: of the square image.
        n_classes: K.
        channels: of the convolutions.
        strides: of the convolutions; each divides the side, rounding up.
        body: widths of the body's linear layers, at least one.
        head: as in :func:`mlp`.
        relu_head: as in :func:`mlp`.
        seed: as in :func:`mlp`.

    Raises:
        ValueError: a size below 1, no channels, or not as many strides as channels.
    """
    _check_sizes(side=[side], channels=channels, strides=strides)
    if len(strides) != len(channels):
        raise ValueError(f"strides must hold one for each of the {len(channels)} channels")
    layers: OrderedDict[str, nn.Module] = OrderedDict(image=nn.Unflatten(1, (1, side, side)))
    for number, (before, after) in enumerate(pairwise([1, *channels]), 1):
        stride = strides[number - 1]
        layers[f"conv{number}"] = skip_init(
            nn.Conv2d, before, after, 3, stride, padding=1, bias=False, dtype=torch.float64
        )
        layers[f"relu_conv{number}"] = nn.ReLU()
        side = -(-side // stride)
    layers["flat"] = nn.Flatten()
    n_features = channels[-1] * side**2
    rest = mlp(n_features, n_classes, body=body, head=head, relu_head=relu_head)
    layers.update(rest.named_children())
    return _initialised(layers, seed)


def head_layers(network: nn.Module) -> list[str]:
    """Names of the head's layers of :func:`mlp` or :func:`cnn`, from first to last.

    Raises:
        ValueError: a network without layers of such names.
    """
    return _weighted(network, lambda name: name.startswith(HEAD))


def later_layers(network: nn.Module) -> list[str]:
    """Names of all linear and convolutional layers after the first.

    Raises:
        ValueError: a network with fewer than two such layers.
    """
    return _weighted(network, lambda name: True, skip=1)


def _weighted(network: nn.Module, wanted: Callable[[str], bool], skip: int = 0) -> list[str]:
    weighted = (nn.Linear, nn.Conv2d)
    names = [n for n, m in network.named_modules() if isinstance(m, weighted) and wanted(n)][skip:]
    if not names:
        raise ValueError("the network has no such layers: build it with mlp(…) or cnn(…)")
    return names


def _check_sizes(**sizes: Sequence[int]) -> None:
    for name, values in sizes.items():
        if any(value < 1 for value in values):
            raise ValueError(f"{name} must hold sizes of at least 1, got {list(values)}")
        if not values and name != "head":
            raise ValueError(f"{name} must not be empty: it is what makes the features")


def _linear(fan_in: int, fan_out: int) -> nn.Linear:
    return skip_init(nn.Linear, fan_in, fan_out, bias=False, dtype=torch.float64)


def _head_layers(widths: Sequence[int], relu: bool) -> OrderedDict[str, nn.Module]:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (before, after) in enumerate(pairwise(widths), 1):
        layers[f"{HEAD}{number}"] = _linear(before, after)
        if relu and number < len(widths) - 1:
            layers[f"{HEAD}{number}_relu"] = nn.ReLU()
    return layers


def _initialised(layers: OrderedDict[str, nn.Module], seed: int) -> nn.Sequential:
    network = nn.Sequential(layers)
    generator = torch.Generator().manual_seed(seed)
    for weight in network.parameters():
        spread = math.sqrt(2 / weight[0].numel())
        nn.init.normal_(weight, std=spread, generator=generator)
    return network


# --- training -------------------------------------------------------------------------------------


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """``[S]`` for ``outputs [S, B, K]`` and ``targets [B]``."""
    one_hot = torch.eye(outputs.shape[2], dtype=outputs.dtype, device=outputs.device)[targets]
    return (outputs - one_hot).square().sum((1, 2)) / (2 * len(targets))


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs.log_softmax(2)[:, torch.arange(len(targets)), targets].mean(1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": _mse,
    "cross_entropy": _cross_entropy,
}


@dataclass(frozen=True)
class Recipe:
    """Stochastic gradient descent with momentum, weight decay and a step-wise learning rate.

    The defaults take the book's perceptron on its 1,000 images to collapse, at a training accuracy
    of about 99 %. They were chosen by :meth:`decay_time`, training accuracy, NC1 and time alone.

    Attributes:
        epochs: passes over the data.
        batch_size: samples a step; the last batch of an epoch may be smaller.
        lr: learning rate at the start.
        momentum: of SGD, in [0, 1).
        weight_decay: λ of the penalty ``λ/2 ‖W‖²``.
        drops: shares of the epochs after which ``lr`` is multiplied by ``drop``.
        drop: factor of the learning rate, in (0, 1].
        loss: ``"mse"``, which is ``(1/2N) Σ ‖f(x_i) − e_{y_i}‖²``, or ``"cross_entropy"``.
        order_seed: of the order of the data, the same for all networks.

    Raises:
        ValueError: a value out of its range.
    """

    epochs: int = 240
    batch_size: int = 50
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 3e-3
    drops: tuple[float, ...] = (0.8, 0.93)
    drop: float = 0.3
    loss: str = "mse"
    order_seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise ValueError("epochs and batch_size must be at least 1")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be a positive number, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if not all(0 < share < 1 for share in self.drops) or not 0 < self.drop <= 1:
            raise ValueError("drops must lie in (0, 1) and drop in (0, 1]")
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {sorted(LOSSES)}, got {self.loss!r}")

    def milestones(self) -> list[int]:
        """Epochs after which the learning rate drops."""
        return [round(share * self.epochs) for share in self.drops]

    def decay_time(self, n_samples: int) -> float:
        """For how many of its time constants the weight decay acts: ``Σ lr λ / (1 − momentum)``
        over the steps. What is left of the initial weights, if nothing holds it, is ``e`` to minus
        that."""
        steps, ends = -(-n_samples // self.batch_size), [*self.milestones(), self.epochs]
        lengths = [end - start for start, end in pairwise([0, *ends])]
        weighted = sum(length * self.drop**drops for drops, length in enumerate(lengths))
        return steps * weighted * self.lr * self.weight_decay / (1 - self.momentum)


#: For the convolutional network, chosen by the same rule.
CNN_RECIPE = Recipe(epochs=300, weight_decay=2.5e-3)


@dataclass(frozen=True)
class Checkpoint:
    """The networks of all seeds after some epochs.

    Attributes:
        epoch: epochs trained.
        networks: one a seed, ordinary modules on their own.
        accuracy: ``[S]`` share of the training set classified as labelled.
        loss: ``[S]`` mean loss of the training set, without the penalty.
    """

    epoch: int
    networks: tuple[nn.Module, ...]
    accuracy: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Training:
    """What came of a training.

    Attributes:
        recipe: how.
        seeds: S of them.
        checkpoints: by rising epoch; the last is the end.
        losses: ``[epochs, S]``, the mean of each epoch's batch losses, without the penalty.
    """

    recipe: Recipe
    seeds: tuple[int, ...]
    checkpoints: tuple[Checkpoint, ...]
    losses: Tensor

    @property
    def final(self) -> Checkpoint:
        """The networks at the end."""
        return self.checkpoints[-1]

    def at(self, epoch: int) -> Checkpoint:
        """The checkpoint after ``epoch`` epochs.

        Raises:
            KeyError: there is none.
        """
        found = {checkpoint.epoch: checkpoint for checkpoint in self.checkpoints}
        if epoch not in found:
            raise KeyError(f"no checkpoint after {epoch} epochs, only after {sorted(found)}")
        return found[epoch]


def train_networks(
    make_network: Callable[[int], nn.Module],
    x: Tensor,
    y: Tensor,
    recipe: Recipe | None = None,
    seeds: Sequence[int] = (0,),
    checkpoints: Sequence[int] = (),
    progress: Callable[[int], object] | None = None,
) -> Training:
    """Train one network a seed, all at once, by SGD with momentum.

    A seed's network does not depend, to rounding, on which other seeds are trained beside it.

    Args:
        make_network: a seed's untrained network; the networks must differ in their weights alone.
        x: ``[N, …]`` inputs, in the dtype of the weights.
        y: ``[N]`` integer classes.
        recipe: how; the default is ``Recipe()``.
        seeds: at least one, handed to ``make_network``.
        checkpoints: epochs after which the networks are kept, 0 for the start; the end always is.
        progress: called with the epoch after each.

    Raises:
        TypeError: inputs in another dtype than the weights.
        ValueError: inputs and labels that do not fit, a checkpoint outside the training, no seed,
            networks that differ in shape, have buffers or are no classifiers.
        FloatingPointError: the training diverged; the message names the learning rate.
    """
    recipe = recipe or Recipe()
    wanted = sorted({*checkpoints, recipe.epochs})
    _check_training(x, y, seeds, wanted, recipe)
    stack = _Stack([make_network(seed) for seed in seeds])
    _check_classifier(stack, x, y)
    kept = [stack.checkpoint(0, x, y, recipe.loss)] if wanted[0] == 0 else []
    order = torch.Generator().manual_seed(recipe.order_seed)
    optimiser = torch.optim.SGD(
        stack.parameters.values(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay
    )
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, recipe.milestones(), recipe.drop)
    losses = torch.empty(recipe.epochs, len(seeds), dtype=torch.float64)
    for epoch in range(1, recipe.epochs + 1):
        batches = torch.randperm(len(x), generator=order).split(recipe.batch_size)
        losses[epoch - 1] = _epoch(stack, optimiser, x, y, batches, recipe.loss)
        _check_converging(losses[epoch - 1], epoch, seeds, recipe)
        schedule.step()
        if epoch in wanted:
            kept.append(stack.checkpoint(epoch, x, y, recipe.loss))
            _check_converging(kept[-1].loss, epoch, seeds, recipe)
        if progress is not None:
            progress(epoch)
    return Training(recipe, tuple(seeds), tuple(kept), losses)


def _epoch(
    stack: _Stack,
    optimiser: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    batches: Sequence[Tensor],
    loss: str,
) -> Tensor:
    """One pass over the data; ``[S]``, the mean over samples of the loss when they were seen."""
    total = torch.zeros(stack.size, dtype=torch.float64)
    for batch in batches:
        optimiser.zero_grad()
        values = LOSSES[loss](stack(x[batch]), y[batch])
        values.sum().backward()  # the networks share nothing, so the sum's gradient is each one's
        optimiser.step()
        total += values.detach().double().cpu() * len(batch)
    return total / len(x)


class _Stack:
    """Networks of one architecture, evaluated together: ``x [B, …]`` gives ``[S, B, K]``."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        shapes = [{n: p.shape for n, p in net.named_parameters()} for net in networks]
        if any(shape != shapes[0] for shape in shapes) or not shapes[0]:
            raise ValueError("make_network must give networks of one architecture, with weights")
        if any(True for _ in networks[0].buffers()):
            raise ValueError("make_network must give networks without buffers (no batch norm)")
        if len([*networks[0].named_parameters(remove_duplicate=False)]) != len(shapes[0]):
            raise ValueError("make_network must give networks that use no weight twice")
        self.size = len(networks)
        self.template = networks[0]
        self.stages = _stages(networks[0])
        stacked, _ = stack_module_state(list(networks))
        self.parameters = {n: p.detach().requires_grad_() for n, p in stacked.items()}

    def __call__(self, x: Tensor) -> Tensor:
        x = x.expand(self.size, *x.shape)
        for prefix, module in self.stages:
            own = {n: p for n, p in self.parameters.items() if n.startswith(prefix)}
            x = _apply(module, {n.removeprefix(prefix): p for n, p in own.items()}, x)
        return x

    def checkpoint(self, epoch: int, x: Tensor, y: Tensor, loss: str) -> Checkpoint:
        with torch.no_grad():
            outputs = self(x)  # [S, N, K]
            accuracy = (outputs.argmax(2) == y).double().mean(1)
            networks = tuple(self._network(seed) for seed in range(self.size))
            return Checkpoint(epoch, networks, accuracy, LOSSES[loss](outputs, y))

    def _network(self, index: int) -> nn.Module:
        network = copy.deepcopy(self.template).eval()
        network.load_state_dict({n: p[index] for n, p in self.parameters.items()})
        return network


def _stages(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """What runs one after the other: a sequence's modules, or the network as a whole."""
    if type(network) is nn.Sequential:
        return [(f"{name}.", module) for name, module in network._modules.items()]
    return [("", network)]


def _apply(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """A stacked module on ``x [S, B, …]``; the plain cases by hand, a third faster than vmap."""
    if type(module) is nn.ReLU:
        return x.relu()
    if type(module) is nn.Linear and module.bias is None:
        return x @ parameters["weight"].mT
    if type(module) is nn.Conv2d and _plain(module):
        return _convolve(module, parameters["weight"], x)
    return vmap(lambda p, z: functional_call(module, p, (z,)))(parameters, x)


def _plain(conv: nn.Conv2d) -> bool:
    simple = conv.bias is None and conv.groups == 1 and conv.padding_mode == "zeros"
    return simple and not isinstance(conv.padding, str)


def _convolve(conv: nn.Conv2d, weight: Tensor, x: Tensor) -> Tensor:
    """One matrix product a network on unfolded patches: vmap's grouped convolution is many times
    slower in float64 on a CPU. ``weight [S, O, C, k, k]``, ``x [S, B, C, H, W]``."""
    options: dict[str, Any] = {"dilation": conv.dilation, "padding": conv.padding}
    seen = x[:1] if x.stride(0) == 0 else x  # the data themselves are the same for all networks
    # samples and channels as one axis: unfold loops over its first axis alone
    patches = F.unfold(seen.flatten(1, 2), conv.kernel_size, stride=conv.stride, **options)
    columns = patches.unflatten(1, (x.shape[1], -1)).movedim(1, 2).flatten(2)  # [S, Ckk, B·places]
    flat = weight.flatten(2)  # [S, O, Ckk]
    out = (
        (flat.flatten(0, 1) @ columns[0]).view(*flat.shape[:2], -1)
        if len(seen) < len(x)
        else flat @ columns
    )
    out = out.unflatten(2, (x.shape[1], -1)).movedim(1, 2)  # [S, B, O, places]
    padded = x.shape[3] + 2 * int(conv.padding[0]) - conv.dilation[0] * (conv.kernel_size[0] - 1)
    height = (padded - 1) // conv.stride[0] + 1
    return out.unflatten(3, (height, -1))  # [S, B, O, H', W']


def _check_training(
    x: Tensor, y: Tensor, seeds: Sequence[int], checkpoints: Sequence[int], recipe: Recipe
) -> None:
    if not len(seeds):
        raise ValueError("seeds must hold at least one seed")
    if y.shape != x.shape[:1] or not len(x) or y.is_floating_point():
        raise ValueError(f"y must hold one integer class for each of the {len(x)} inputs")
    if not x.isfinite().all():
        raise ValueError("x holds a NaN or an infinite value")
    if checkpoints[0] < 0 or checkpoints[-1] > recipe.epochs:
        raise ValueError(f"checkpoints must lie in 0 … {recipe.epochs}, got {list(checkpoints)}")


def _check_classifier(stack: _Stack, x: Tensor, y: Tensor) -> None:
    dtype = next(iter(stack.parameters.values())).dtype
    if x.dtype != dtype:
        raise TypeError(f"x is {x.dtype}, the weights are {dtype}: convert one of them")
    shape = list(stack(x[:1]).shape)
    if len(shape) != 3:
        raise ValueError(f"make_network must give classifiers [N, …] → [N, K], not {shape[1:]}")
    if y.min() < 0 or y.max() >= shape[2]:
        raise ValueError(f"y must lie in 0 … {shape[2] - 1}, one class an output of the networks")


def _check_converging(losses: Tensor, epoch: int, seeds: Sequence[int], recipe: Recipe) -> None:
    if losses.isfinite().all():
        return
    lost = [seed for seed, loss in zip(seeds, losses, strict=True) if not loss.isfinite()]
    raise FloatingPointError(
        f"the training diverged in epoch {epoch} at lr={recipe.lr:g} (seeds {lost}): lower lr"
    )
