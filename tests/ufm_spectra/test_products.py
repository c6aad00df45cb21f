"""The factored Gauss–Newton product against the matrix with every Jacobian written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from proofread.ufm_spectra import products
from proofread.ufm_spectra.products import gauss_newton_product

SHAPES = {  # N, K, O, I, B
    "one of everything": (1, 1, 1, 1, 1),
    "odd": (37, 5, 7, 11, 3),
    "one output": (9, 1, 6, 4, 2),
    "more outputs than units": (20, 9, 3, 5, 4),
    "wide": (50, 4, 33, 2, 1),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
losses = pytest.mark.parametrize("softmax", [False, True], ids=["mse", "cross-entropy"])
Problem = tuple[Tensor, Tensor, Tensor, Tensor]


def naive(a: Tensor, h: Tensor, v: Tensor, p: Tensor | None) -> Tensor:
    """``(1/N) Σ_i J_iᵀ S_i J_i vec(V)`` with ``J_i = A_i ⊗ h_iᵀ`` ``[K, O·I]`` written out."""
    total = torch.zeros_like(v).reshape(-1, v.shape[-2] * v.shape[-1])  # [B, O·I]
    for i in range(len(a)):
        jacobian = torch.kron(a[i], h[i][None, :])
        s = torch.eye(a.shape[1], dtype=a.dtype)
        if p is not None:
            s = torch.diag(p[i]) - torch.outer(p[i], p[i])
        total += v.reshape(total.shape) @ (jacobian.T @ s @ jacobian) / len(a)
    return total.reshape(v.shape)


def problem(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> Problem:
    """backward [N, K, O], features [N, I], direction [B, O, I], probabilities [N, K]."""
    n, k, o, i, b = shape
    g = torch.Generator().manual_seed(seed)
    p = torch.softmax(torch.randn(n, k, generator=g, dtype=torch.float64), 1)
    made = [torch.randn(*size, generator=g, dtype=torch.float64) for size in ((n, k, o), (n, i))]
    direction = torch.randn(b, o, i, generator=g, dtype=torch.float64)
    a, h, v, p = (t.to(dtype) for t in (*made, direction, p))
    return a, h, v, p


def close(found: Tensor, right: Tensor, tolerance: float) -> None:
    scale = max(float(right.abs().max()), 1e-300)
    torch.testing.assert_close(found.double(), right.double(), rtol=0, atol=tolerance * scale)


@losses
@shapes
def test_equals_the_written_out_matrix(shape: tuple[int, ...], softmax: bool) -> None:
    a, h, v, p = problem(shape)
    q = p if softmax else None
    right = naive(a, h, v, q)
    if shape[1] == 1 and softmax:
        assert not gauss_newton_product(a, h, v, q).abs().max() > 1e-15  # S = p − p² = 0
        return
    for chunk in (None, 1, 8, 1000):
        close(gauss_newton_product(a, h, v, q, chunk=chunk), right, 1e-13)
    close(gauss_newton_product(a, h, v[0], q), right[0], 1e-13)
    q = None if q is None else q.float()
    found = gauss_newton_product(a.float(), h.float(), v.float(), q)
    assert found.dtype == torch.float32
    close(found, right, 2e-6)


@losses
def test_equals_the_hessian_of_a_linear_classifier(softmax: bool) -> None:
    """For f = M W h the Gauss–Newton matrix in W is the Hessian of the loss, by autograd."""
    n, k, o, i = 12, 4, 3, 5
    g = torch.Generator().manual_seed(1)
    m, w, v = (torch.randn(*s, generator=g).double() for s in ((k, o), (o, i), (o, i)))
    h, target = torch.randn(n, i, generator=g).double(), torch.arange(n) % k

    def loss(weight: Tensor) -> Tensor:
        f = h @ weight.T @ m.T
        if softmax:
            return torch.nn.functional.cross_entropy(f, target)
        return (f - torch.eye(k).double()[target]).square().sum() / (2 * n)

    _, right = torch.autograd.functional.hvp(loss, w, v)
    p = torch.softmax(h @ w.T @ m.T, 1) if softmax else None
    close(gauss_newton_product(m.expand(n, k, o), h, v, p), right, 1e-13)


def test_last_layer_is_the_second_moment_of_its_inputs() -> None:
    """A = I and S = I: V (1/N) Σ h hᵀ; here h runs through 2·e_1, 2·e_2."""
    a, h = torch.eye(3).expand(2, 3, 3), 2 * torch.eye(2)
    v = torch.arange(6.0).view(3, 2)
    assert torch.equal(gauss_newton_product(a, h, v), 2 * v)


def test_cross_entropy_does_not_see_a_common_shift() -> None:
    a, h, v, p = problem((30, 6, 6, 4, 2))
    a = torch.eye(6).double().expand(30, 6, 6)
    v = torch.ones(6, 1).double() * v[:, :1]  # all logits of a sample move alike
    assert gauss_newton_product(a, h, v, p).abs().max() < 1e-15
    assert gauss_newton_product(a, h, v).abs().max() > 0.1


@losses
def test_symmetric_and_positive(softmax: bool) -> None:
    a, h, v, p = problem((40, 6, 5, 7, 8))
    image = gauss_newton_product(a, h, v, p if softmax else None)
    gram = v.reshape(8, -1) @ image.reshape(8, -1).T  # [B, B]
    close(gram, gram.T, 1e-13)
    assert torch.linalg.eigvalsh(gram)[0] > 0


def test_small_blocks_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row blocks of 4 rows: what is made for a block has 4 rows, and the result is the same."""
    a, h, v, p = problem((30, 6, 5, 7, 8))
    right = gauss_newton_product(a, h, v, p)
    monkeypatch.setattr(products, "MIN_ROWS", 4)
    monkeypatch.setattr(products, "BLOCK_BYTES", 1)
    seen, plain = [], products._curvature

    def curvature(c: Tensor, q: Tensor | None) -> Tensor:
        seen.append(len(c))
        return plain(c, q)

    monkeypatch.setattr(products, "_curvature", curvature)
    close(gauss_newton_product(a, h, v, p), right, 1e-13)
    assert seen == [4] * 7 + [2]


def test_inputs_are_left_alone_and_strides_do_not_matter() -> None:
    a, h, v, p = problem((37, 5, 7, 11, 3))
    right = naive(a, h, v, p)
    odd = (
        a.transpose(1, 2).contiguous().transpose(1, 2),
        h.T.contiguous().T,
        v.repeat_interleave(2, 2)[:, :, ::2],
        p.repeat_interleave(3, 0)[::3],
    )
    copies = [t.clone() for t in odd]
    assert not any(t.is_contiguous() for t in odd)
    close(gauss_newton_product(*odd), right, 1e-13)
    assert all(torch.equal(t, c) for t, c in zip(odd, copies, strict=True))
    flipped = v.mT.contiguous().mT  # [O, I] column by column
    close(gauss_newton_product(a, h, flipped[1], p), right[1], 1e-13)


def test_no_gradient_is_recorded() -> None:
    a, h, v, p = (t.requires_grad_() for t in problem((9, 3, 4, 5, 2)))
    assert not gauss_newton_product(a, h, v, p).requires_grad


@pytest.mark.parametrize("at", range(4))
def test_not_a_number_shows(at: int) -> None:
    inputs = problem((9, 3, 4, 5, 2))
    inputs[at].view(-1)[7] = math.nan
    assert gauss_newton_product(*inputs).isnan().any()


BAD = {
    "features must be": lambda a, h, v, p: (a, h[:-1], v, p),
    r"direction must be \[7, 11\]": lambda a, h, v, p: (a, h, v[0].T, p),
    r"direction must be \[3, 7, 11\]": lambda a, h, v, p: (a, h, v[:, :-1], p),
    r"direction must be \[7, 11\], got \[1, 3, 7, 11\]": lambda a, h, v, p: (a, h, v[None], p),
    r"probabilities must be \[37, 5\]": lambda a, h, v, p: (a, h, v, p[:, :-1]),
    r"backward must be \[N, K, O\]": lambda a, h, v, p: (a[0], h, v, p),
    "backward is empty": lambda a, h, v, p: (a[:0], h[:0], v, p[:0]),
    "direction is empty": lambda a, h, v, p: (a, h, v[:0], p),
    "backward is on meta but features on cpu": lambda a, h, v, p: (a.to("meta"), h, v, p),
}
BAD_TYPES = {
    "backward must be float32 or float64, got torch.bfloat16": lambda a, h, v, p: (
        *(a.bfloat16(), h, v, p),
    ),
    "direction is torch.float32 but features are torch.float64": lambda a, h, v, p: (
        *(a, h, v.float(), p),
    ),
    "probabilities must be float32 or float64, got torch.int64": lambda a, h, v, p: (
        *(a, h, v, p.long()),
    ),
    "features must be a tensor, got list": lambda a, h, v, p: (a, h.tolist(), v, p),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_values(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gauss_newton_product(*BAD[message](*problem((37, 5, 7, 11, 3))))


@pytest.mark.parametrize("message", BAD_TYPES)
def test_bad_types(message: str) -> None:
    with pytest.raises(TypeError, match=message):
        gauss_newton_product(*BAD_TYPES[message](*problem((37, 5, 7, 11, 3))))


@pytest.mark.parametrize("chunk", [0, -3])
def test_bad_chunk(chunk: int) -> None:
    with pytest.raises(ValueError, match="chunk must be a positive number of rows"):
        gauss_newton_product(*problem((37, 5, 7, 11, 3)), chunk=chunk)
