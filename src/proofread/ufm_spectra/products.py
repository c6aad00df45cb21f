"""Gauss–Newton product of one linear layer, from factors that are never multiplied out.

For a sample with input ``h`` of the layer and ``A = ∂ output / ∂ (W h)``, the Jacobian of the K
outputs in the flattened weight is ``A ⊗ hᵀ``, ``K × OI`` numbers. Its product with a direction
needs ``V h`` and ``A`` alone, and the transposed product is a sum of outer products.

**Count.** For N samples, K outputs, weights ``[O, I]`` and B directions:

- two matrix products ``[N, I] × [I, BO]`` and ``[BO, N] × [N, I]``: 4·N·B·O·I FLOP,
- two batched ones with ``A``: 4·N·B·K·O FLOP; ``S`` takes 3·N·B·K more.

Multiplying out ``Aᵀ S A``, O × O numbers a sample, would replace 4BKO by 2KO² + 2BO². It is fewer
for O < 2BK/(B + K), but touches a share K/(I + K) of the work at most: not done.

Rows are taken in blocks, so that ``u = V h`` and ``s = Aᵀ S c`` take ``[rows, B, O]`` and not
``[N, B, O]``, and a cache serves the second reading of ``A``. A direction takes
2·N·(K·O + I) + 4·N·(O + K) numbers of traffic if nothing is served twice: about (I + K)/(2K + 4)
FLOP a byte in float32 and for large O.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proofread.triton_support import use_triton

__all__ = ["gauss_newton_product"]

DTYPES = (torch.float32, torch.float64)
BLOCK_BYTES = 4 << 20
MIN_ROWS = 256  # fewer make matrix products slow and read the direction too often


@torch.no_grad()
def gauss_newton_product(
    backward: Tensor,
    features: Tensor,
    direction: Tensor,
    probabilities: Tensor | None = None,
    *,
    chunk: int | None = None,
) -> Tensor:
    """``(1/N) Σ_i A_iᵀ S_i A_i V h_i h_iᵀ``, the Gauss–Newton matrix of a layer times ``V``.

    The matrix is that of ``(1/2N) Σ ‖f(x_i) − y_i‖²`` with ``S_i = I``, or that of the mean
    cross-entropy with ``S_i = diag(p_i) − p_i p_iᵀ``; for a network that is linear in the layer's
    weight given the other layers, squared error, the layer's Hessian is this matrix.

    CUDA tensors take a Triton kernel that keeps all that belongs to a sample on chip, up to 256
    outputs; CPU tensors take torch, in blocks of rows. No gradients are recorded.

    Args:
        backward: ``A``, ``[N, K, O]``: derivative of the K outputs in the O pre-activations;
            float32 or float64.
        features: ``h``, ``[N, I]``: inputs of the layer.
        direction: ``V``, ``[O, I]``, or ``[B, O, I]`` for B directions at once.
        probabilities: ``p``, ``[N, K]``, or None for ``S = I``.
        chunk: rows at a time on the torch path; by default what fits in 4 MiB, 256 at least.

    Returns:
        The product, in the shape of ``direction``. All tensors share one dtype and device.

    Raises:
        TypeError: an input is not a float32 or float64 tensor, or dtypes differ.
        ValueError: shapes or devices do not fit, a size is zero, or ``chunk`` is not positive.
    """
    _check(backward, features, direction, probabilities)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be a positive number of rows, got {chunk}")
    stack = direction if direction.ndim == 3 else direction[None]  # [B, O, I]
    product = _on_gpu(backward, features, stack, probabilities) if use_triton(features) else None
    if product is None:
        product = _blocked(backward, features, stack, probabilities, chunk)
    return product.reshape(direction.shape)


def _on_gpu(backward: Tensor, features: Tensor, stack: Tensor, p: Tensor | None) -> Tensor | None:
    """The product by the kernel, ``[B, O, I]``; None if it doesn't take this problem."""
    from .kernels import gauss_newton_triton, takes

    if not takes(backward.shape[1], *stack.shape[1:]):
        return None
    return gauss_newton_triton(backward, features, stack, p)


def _blocked(
    backward: Tensor, features: Tensor, stack: Tensor, p: Tensor | None, chunk: int | None
) -> Tensor:
    """The product on the torch path, ``[B·O, I]``."""
    n, width = len(features), stack.shape[1]
    flat = stack.reshape(-1, stack.shape[2])  # [B·O, I]
    rows = chunk or _rows(backward, features, stack)
    total = torch.zeros_like(flat, memory_format=torch.contiguous_format)
    for start in range(0, n, rows):
        block = slice(start, start + rows)
        a, h = backward[block], features[block]  # [n, K, O], [n, I]
        u = (h @ flat.mT).view(len(h), -1, width)  # [n, B, O]
        c = _curvature(u @ a.mT, None if p is None else p[block])  # [n, B, K]
        s = torch.bmm(c, a, out=u)
        total.addmm_(s.view(len(h), -1).mT, h, alpha=1 / n)
    return total


def _curvature(c: Tensor, p: Tensor | None) -> Tensor:
    """``S c`` for ``c`` ``[n, B, K]`` and probabilities ``[n, K]``."""
    if p is None:
        return c
    weighted = c * p[:, None]
    return weighted.sub_(p[:, None] * weighted.sum(-1, keepdim=True))


def _rows(backward: Tensor, features: Tensor, stack: Tensor) -> int:
    """Rows of a block whose share of A, h, u (then s) and c fills ``BLOCK_BYTES``."""
    _, k, o = backward.shape
    b, inner = len(stack), features.shape[1]
    row = (k * o + inner + b * (o + k)) * features.element_size()
    return max(MIN_ROWS, BLOCK_BYTES // row)


def _check(backward: Tensor, features: Tensor, direction: Tensor, p: Tensor | None) -> None:
    given = {"backward": backward, "features": features, "direction": direction}
    if p is not None:
        given["probabilities"] = p
    _check_types(given)
    if backward.ndim != 3 or features.ndim != 2:
        raise ValueError(
            "backward must be [N, K, O] and features [N, I], got "
            f"{list(backward.shape)} and {list(features.shape)}"
        )
    (n, k, o), inner = backward.shape, features.shape[1]
    expected: dict[str, tuple[int, ...]] = {"features": (n, inner), "probabilities": (n, k)}
    expected["direction"] = (len(direction), o, inner) if direction.ndim == 3 else (o, inner)
    for name, shape in expected.items():
        if name in given and given[name].shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(given[name].shape)}")
    for name, tensor in given.items():
        if tensor.numel() == 0:
            raise ValueError(f"{name} is empty: its shape is {list(tensor.shape)}")


def _check_types(given: dict[str, Tensor]) -> None:
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name} must be float32 or float64, got {tensor.dtype}: call .float() on it"
            )
    like = given["features"]
    for name, tensor in given.items():
        if tensor.dtype != like.dtype:
            raise TypeError(f"{name} is {tensor.dtype} but features are {like.dtype}: cast one")
        if tensor.device != like.device:
            raise ValueError(
                f"{name} is on {tensor.device} but features on {like.device}: move one"
            )
