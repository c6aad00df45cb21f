"""The eigensolvers against chosen spectra, NumPy's and SciPy's solvers, and attacks."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, aslinearoperator, eigsh
from torch import Tensor

from proofread.ufm_spectra import eigensolvers
from proofread.ufm_spectra.eigensolvers import Eigenpairs, spectral_density, top_eigenpairs


class Counted:
    """A diagonal operator that counts its columns; ``turn`` [P, P] rotates it."""

    def __init__(self, values: Tensor, turn: Tensor | None = None) -> None:
        self.values, self.turn, self.columns = values, turn, 0
        self.shape, self.dtype, self.device = (len(values),) * 2, values.dtype, values.device

    def matmat(self, v: Tensor) -> Tensor:
        self.columns += v.shape[1]
        if self.turn is None:
            return self.values[:, None] * v
        return self.turn @ (self.values[:, None] * (self.turn.T @ v))


def rotation(size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator).double())[0]


def dense(values: Tensor, seed: int = 0) -> Tensor:
    turn = rotation(len(values), seed)
    matrix = turn @ torch.diag(values) @ turn.T
    return (matrix + matrix.T) / 2


def outliers_and_bulk(size: int = 2000, k: int = 100, gap: float = 1.3) -> Tensor:
    """k outliers evenly spread over [0.05, 1], then a bulk that decays from 0.05/gap."""
    bulk = 0.05 / gap * torch.exp(-torch.arange(size - k) / 5.0).double()
    return torch.cat([torch.linspace(1.0, 0.05, k).double(), bulk])


def check(pairs: Eigenpairs, matrix: Tensor, k: int, tol: float = 1e-3) -> None:
    """Shapes, orthonormality, and residuals recomputed from the matrix."""
    assert pairs.values.shape == pairs.residuals.shape == pairs.residuals_relative.shape == (k,)
    assert pairs.vectors.shape == (len(matrix), k)
    unit = pairs.vectors.T @ pairs.vectors
    assert torch.allclose(unit, torch.eye(k, dtype=matrix.dtype), atol=1e-10)
    true = torch.linalg.vector_norm(matrix @ pairs.vectors - pairs.vectors * pairs.values, dim=0)
    scale = float(torch.linalg.matrix_norm(matrix, 2))
    assert torch.allclose(true, pairs.residuals, atol=1e-12 * scale)
    assert pairs.converged
    assert float(true.max()) <= tol * scale * (1 + 1e-9)


@pytest.mark.parametrize("block_size", [1, 2, 5])
@pytest.mark.parametrize("which", ["LM", "LA"])
def test_equals_numpy_and_scipy(which: str, block_size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(150, generator=generator).double() ** 3
    matrix = dense(values)
    pairs = top_eigenpairs(matrix, 6, which=which, tol=1e-9, block_size=block_size)
    check(pairs, matrix, 6, 1e-9)
    exact, vectors = np.linalg.eigh(matrix.numpy())
    order = np.argsort(-np.abs(exact) if which == "LM" else -exact)[:6]
    assert pairs.values.numpy() == pytest.approx(exact[order], rel=1e-10)
    overlap = np.abs(vectors[:, order].T @ pairs.vectors.numpy())
    assert overlap == pytest.approx(np.eye(6), abs=1e-6)
    peer = eigsh(matrix.numpy(), 6, which=which, return_eigenvectors=False)
    assert np.sort(pairs.values.numpy()) == pytest.approx(np.sort(peer), rel=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_few_applications_for_outliers_over_a_decaying_bulk(seed: int) -> None:
    values = outliers_and_bulk()
    operator = Counted(values)
    pairs = top_eigenpairs(operator, 100, seed=seed)
    assert pairs.applications == operator.columns <= 131
    assert pairs.converged
    assert pairs.verified
    assert not pairs.unresolved
    assert float((pairs.values - values[:100]).abs().max()) < 1e-3
    assert pairs.gap == pytest.approx(1.3, rel=0.05)


def test_fewer_applications_than_scipy() -> None:
    values = outliers_and_bulk()
    columns = 0

    def multiply(v: np.ndarray) -> np.ndarray:
        nonlocal columns
        columns += 1
        return values.numpy() * v.ravel()

    eigsh(LinearOperator((2000, 2000), matvec=multiply, dtype=float), 100, tol=1e-3)
    ours = top_eigenpairs(Counted(values), 100)
    assert ours.applications <= 0.65 * columns


@pytest.mark.parametrize("block_size", [1, 2, 8, 25])
def test_all_copies_of_a_multiple_eigenvalue(block_size: int) -> None:
    """K² = 25 equal outliers and zeros: every random direction shows one copy."""
    values = torch.zeros(120).double()
    values[:25] = 0.7
    matrix = dense(values)
    pairs = top_eigenpairs(matrix, 25, block_size=block_size)
    check(pairs, matrix, 25)
    assert torch.allclose(pairs.values, values[:25], atol=1e-9)
    assert pairs.applications <= 2 * 25 + 4 * block_size + 8
    assert pairs.gap == math.inf
    assert not pairs.unresolved
    assert pairs.subspace_bound < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_verification_finds_missed_copies(seed: int) -> None:
    """Distinct bulk, so no breakdown: one column sees one copy of five, and nothing looks wrong."""
    values = torch.cat([torch.tensor([10.0] * 5 + [5, 4]).double(), torch.linspace(1, 0, 300)])
    blind = top_eigenpairs(Counted(values), 3, block_size=1, verify=False, seed=seed)
    assert blind.converged
    assert not blind.verified
    assert blind.values.tolist() == pytest.approx([10, 5, 4], abs=1e-2)
    seeing = top_eigenpairs(Counted(values), 7, block_size=1, seed=seed)
    assert seeing.verified
    assert seeing.values.tolist() == pytest.approx(values[:7].tolist(), abs=1e-2)


def test_verification_of_an_exact_low_rank_costs_four_products() -> None:
    values = torch.zeros(400).double()
    values[:10] = torch.arange(10, 0, -1)
    blind = top_eigenpairs(Counted(values), 10, tol=1e-6, block_size=3, verify=False)
    seeing = top_eigenpairs(Counted(values), 10, tol=1e-6, block_size=3)
    assert seeing.applications <= blind.applications + 4
    assert seeing.verified


def test_more_pairs_than_rank_are_filled_with_zeros() -> None:
    values = torch.zeros(60).double()
    values[:3] = torch.tensor([3.0, -2, 1])
    matrix = dense(values)
    pairs = top_eigenpairs(matrix, 8)
    check(pairs, matrix, 8)
    assert pairs.values.tolist() == pytest.approx([3, -2, 1, 0, 0, 0, 0, 0], abs=1e-9)
    assert pairs.unresolved  # any of the other null vectors would have done as well
    assert math.isnan(pairs.gap)


def test_zero_operator() -> None:
    pairs = top_eigenpairs(torch.zeros(7, 7).double(), 3)
    assert pairs.converged
    assert torch.equal(pairs.values, torch.zeros(3).double())
    assert torch.equal(pairs.residuals_relative, torch.zeros(3).double())


@pytest.mark.parametrize("size", [1, 2, 5, 33])
def test_all_pairs(size: int) -> None:
    values = torch.linspace(-1, 2, size).double() if size > 1 else torch.tensor([-3.0]).double()
    matrix = dense(values)
    pairs = top_eigenpairs(matrix, size, which="LA")
    check(pairs, matrix, size)
    assert torch.allclose(pairs.values, values.flip(0), atol=1e-10)
    assert pairs.applications == size
    assert pairs.gap == math.inf
    assert pairs.verified


def test_negative_eigenvalues() -> None:
    values = torch.cat([torch.tensor([-5.0, 4, -3, 2]).double(), torch.linspace(-0.1, 0.1, 100)])
    matrix = dense(values)
    by_modulus = top_eigenpairs(matrix, 4, tol=1e-6)
    assert by_modulus.values.tolist() == pytest.approx([-5, 4, -3, 2], abs=1e-6)
    by_value = top_eigenpairs(matrix, 2, which="LA", tol=1e-6)
    assert by_value.values.tolist() == pytest.approx([4, 2], abs=1e-6)
    assert by_value.gap == pytest.approx(2 / 0.1, rel=0.1)  # |λ_3| from below, by its Ritz value


def test_a_cluster_cut_through_is_said() -> None:
    values = torch.cat([torch.tensor([5.0, 4, 3.0, 3.0]).double(), torch.linspace(1, 0, 100)])
    cut = top_eigenpairs(dense(values), 3, tol=1e-8)
    whole = top_eigenpairs(dense(values), 4, tol=1e-8)
    assert cut.converged
    assert cut.unresolved
    assert cut.subspace_bound == math.inf
    assert not whole.unresolved
    assert whole.gap == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("tol", [0.1, 1e-2, 1e-4])
def test_davis_kahan_bound_holds(tol: float) -> None:
    values = torch.cat([torch.tensor([5.0, 4, 3]).double(), torch.linspace(1.5, -1, 200)])
    turn = rotation(len(values))
    pairs = top_eigenpairs(Counted(values, turn), 3, tol=tol, verify=False)
    outside = pairs.vectors - turn[:, :3] @ (turn[:, :3].T @ pairs.vectors)
    sine = float(torch.linalg.matrix_norm(outside, 2))
    assert sine <= pairs.subspace_bound
    assert pairs.subspace_bound < 50 * sine + 1e-12


@pytest.mark.parametrize("block_size", [None, 10])
def test_exact_start_needs_nothing_more(block_size: int | None) -> None:
    values = torch.cat([torch.linspace(2, 1, 10).double(), torch.zeros(190).double()])
    turn = rotation(200)
    start = turn[:, :10] @ torch.randn(10, 10, generator=torch.Generator().manual_seed(0)).double()
    pairs = top_eigenpairs(
        Counted(values, turn), 10, start=start, block_size=block_size, verify=False
    )
    assert pairs.applications == 10
    assert torch.allclose(pairs.values, values[:10], atol=1e-10)
    assert math.isnan(pairs.gap)
    verified = top_eigenpairs(Counted(values, turn), 10, start=start, block_size=block_size)
    assert verified.gap == math.inf
    assert verified.applications == 14


def test_start_orthogonal_to_the_answer() -> None:
    """The span is invariant but holds the wrong pairs: only the verification can tell."""
    values = torch.cat([torch.linspace(2, 1, 5).double(), torch.linspace(0.5, 0, 195).double()])
    turn = rotation(200)
    pairs = top_eigenpairs(Counted(values, turn), 5, start=turn[:, 100:110])
    assert pairs.values.tolist() == pytest.approx(values[:5].tolist(), abs=2e-3)
    assert pairs.verified


def test_start_of_dependent_and_zero_columns() -> None:
    matrix = dense(torch.linspace(1, 0, 50).double() ** 4)
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(50, 2, generator=generator).double()
    start = torch.cat([start, start.sum(1, keepdim=True), torch.zeros(50, 1)], 1)
    pairs = top_eigenpairs(matrix, 3, start=start, tol=1e-8)
    check(pairs, matrix, 3, 1e-8)
    wide = top_eigenpairs(matrix, 3, start=torch.eye(50), tol=1e-8)
    assert torch.allclose(wide.values, pairs.values)


def test_a_poor_start_is_no_burden() -> None:
    """100 random directions, taken whole, would cost 100 products and help nothing."""
    values = outliers_and_bulk()
    start = torch.randn(2000, 100, generator=torch.Generator().manual_seed(5)).double()
    pairs = top_eigenpairs(Counted(values), 100, start=start)
    assert pairs.converged
    assert pairs.applications <= 131


def test_thick_restart_reaches_the_same_pairs() -> None:
    values = torch.cat([torch.tensor([3.0, 2.5, 2.2]).double(), torch.linspace(2, 0, 500)])
    free = top_eigenpairs(Counted(values), 3, tol=1e-8)
    tight = top_eigenpairs(Counted(values), 3, tol=1e-8, max_basis=20, max_applications=2000)
    assert tight.applications > free.applications > 20
    assert torch.allclose(tight.values, values[:3], atol=1e-9)
    true = torch.linalg.vector_norm(
        values[:, None] * tight.vectors - tight.vectors * tight.values, dim=0
    )
    assert torch.allclose(true, tight.residuals, atol=1e-13)
    assert float(true.max()) <= 3e-8


def test_float32() -> None:
    values = outliers_and_bulk(500, 20)
    pairs = top_eigenpairs(dense(values).float(), 20)
    assert pairs.values.dtype == pairs.vectors.dtype == torch.float32
    assert torch.allclose(pairs.values.double(), values[:20], atol=1e-3)
    unit = pairs.vectors.T @ pairs.vectors
    assert torch.allclose(unit, torch.eye(20), atol=1e-5)
    with pytest.warns(RuntimeWarning, match="float32"):
        top_eigenpairs(dense(values).float(), 20, tol=1e-9)


def test_float32_multiplicity() -> None:
    values = torch.zeros(120).double()
    values[:16] = 0.7
    pairs = top_eigenpairs(dense(values).float(), 16)
    assert torch.allclose(pairs.values, torch.full((16,), 0.7), atol=1e-5)
    assert pairs.gap > 1e3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scipy_operators(dtype: type) -> None:
    values = torch.linspace(1, 0, 80).double() ** 4
    matrix = dense(values).numpy().astype(dtype)
    pairs = top_eigenpairs(aslinearoperator(matrix), 4)
    assert pairs.vectors.dtype == (torch.float32 if dtype is np.float32 else torch.float64)
    assert torch.allclose(pairs.values.double(), values[:4], atol=1e-4)
    nodes = spectral_density(aslinearoperator(matrix), n_probes=2, steps=5).nodes
    assert nodes.shape == (2, 5)


def test_same_seed_same_answer_and_operator_untouched() -> None:
    matrix = dense(torch.linspace(1, 0, 60).double() ** 4)
    copy = matrix.clone()
    first, second = (top_eigenpairs(matrix, 3, seed=7) for _ in range(2))
    assert torch.equal(first.vectors, second.vectors)
    assert torch.equal(matrix, copy)


def test_not_converged_is_said() -> None:
    matrix = dense(torch.linspace(1, 0, 300).double())
    with pytest.warns(RuntimeWarning, match="raise max_applications"):
        pairs = top_eigenpairs(matrix, 5, tol=1e-8, max_applications=20)
    assert not pairs.converged
    assert not pairs.verified
    assert pairs.applications == 20
    true = torch.linalg.vector_norm(matrix @ pairs.vectors - pairs.vectors * pairs.values, dim=0)
    assert torch.allclose(true, pairs.residuals, atol=1e-12)
    assert torch.allclose(pairs.residuals_relative, true / pairs.values.abs())


@pytest.mark.parametrize("skew", [1.0, 0.01])
def test_asymmetry_is_found_without_products_of_its_own(skew: float) -> None:
    matrix = dense(torch.linspace(1, 0, 40).double())
    generator = torch.Generator().manual_seed(2)
    matrix = matrix + skew * torch.randn(40, 40, generator=generator).double() / math.sqrt(40)
    with pytest.raises(ValueError, match="not symmetric"):
        top_eigenpairs(matrix, 3)


def broken(value: float) -> Tensor:
    matrix = torch.eye(6).double()
    matrix[2, 3] = matrix[3, 2] = value
    return matrix


EYE = torch.eye(6).double()
BAD = {
    "k = 0": (EYE, {"k": 0}, ValueError, "k=0"),
    "k > P": (EYE, {"k": 7}, ValueError, "between 1 and 6"),
    "k a float": (EYE, {"k": 2.0}, TypeError, "integer"),
    "k a bool": (EYE, {"k": True}, TypeError, "integer"),
    "tol": (EYE, {"k": 1, "tol": 0}, ValueError, "tol"),
    "tol NaN": (EYE, {"k": 1, "tol": math.nan}, ValueError, "tol"),
    "which": (EYE, {"k": 1, "which": "SM"}, ValueError, "which"),
    "block": (EYE, {"k": 1, "block_size": 7}, ValueError, "block_size"),
    "limit": (EYE, {"k": 3, "max_applications": 2}, ValueError, "max_applications"),
    "basis": (EYE, {"k": 3, "max_basis": 3}, ValueError, "max_basis"),
    "start shape": (EYE, {"k": 1, "start": torch.ones(5, 1)}, ValueError, r"\[6, s\]"),
    "start vector": (EYE, {"k": 1, "start": torch.ones(6)}, ValueError, r"\[6, s\]"),
    "start empty": (EYE, {"k": 1, "start": torch.ones(6, 0)}, ValueError, r"\[6, s\]"),
    "start integer": (EYE, {"k": 1, "start": torch.ones(6, 1).int()}, TypeError, "dtype"),
    "start zero": (EYE, {"k": 1, "start": torch.zeros(6, 2)}, ValueError, "start is zero"),
    "start NaN": (EYE, {"k": 1, "start": torch.full((6, 2), math.nan)}, ValueError, "NaN"),
    "start array": (EYE, {"k": 1, "start": np.ones((6, 1))}, TypeError, "tensor"),
    "NaN": (broken(math.nan), {"k": 1}, ValueError, "NaN"),
    "infinite": (broken(math.inf), {"k": 1}, ValueError, "infinity"),
    "oblong": (torch.ones(3, 4), {"k": 1}, ValueError, "square"),
    "empty": (torch.ones(0, 0), {"k": 1}, ValueError, "non-empty"),
    "half": (EYE.half(), {"k": 1}, TypeError, "float16"),
    "complex": (aslinearoperator(np.eye(3) * 1j), {"k": 1}, TypeError, "complex"),
    "no operator": ("H", {"k": 1}, TypeError, "str"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input(case: str) -> None:
    operator, options, error, words = BAD[case]
    k = options.pop("k") if "k" in (options := dict(options)) else 1
    with pytest.raises(error, match=words):
        top_eigenpairs(operator, k, **options)


def test_start_may_require_grad_and_be_strided() -> None:
    matrix = dense(torch.linspace(1, 0, 40).double() ** 4).requires_grad_()
    start = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).T.requires_grad_()
    pairs = top_eigenpairs(matrix, 3, start=start)
    assert not pairs.vectors.requires_grad
    assert not pairs.values.requires_grad


def test_stored_products_explain_themselves() -> None:
    """The invariant of the search space: HQ = QT + UB with orthonormal [Q, U], at every step."""
    matrix = dense(torch.linspace(1, -0.5, 80).double() ** 3)
    search = eigensolvers._Search(
        eigensolvers._adapt(matrix), "LM", 10**6, 1e-13, 1e-7, torch.Generator(), 30
    )
    search.begin(torch.eye(80).double()[:6], 2, 1e-12)
    for width in (2, 3, 1, 4, 2, 2, 3, 2, 2, 3, 2, 2, 3, 4, 3, 4, 3):  # past a restart
        search.grow(4, width)
        both = torch.cat([search.basis, search.pool])
        assert torch.allclose(both @ both.T, torch.eye(len(both)).double(), atol=1e-12)
        t = search.projected[: search.size, : search.size]
        built = t @ search.basis + search.coupling.T @ search.pool
        assert torch.allclose(built, search.basis @ matrix, atol=1e-11)
        assert torch.allclose(search.products, search.basis @ matrix, atol=1e-12)
    assert search.applications > 30


# --- densities ---------------------------------------------------------------------------------


def test_moments_are_exact_in_the_mean() -> None:
    values = torch.cat([torch.tensor([8.0, -6]).double(), torch.linspace(-1, 1, 98)])
    density = spectral_density(dense(values), n_probes=40, steps=12, seed=1)
    for power in range(5):
        exact = float((values**power).mean())
        estimate = density.moment(power)
        error = (estimate.high - estimate.low) / 4
        assert abs(estimate.value - exact) <= 4 * error + 1e-12
    assert density.moment(0).value == pytest.approx(1, abs=1e-12)


def test_quadrature_of_a_probe_is_gauss() -> None:
    """Each probe's moments up to 2·steps - 1 equal vᵀHᵖv of its own vector."""
    matrix = dense(torch.linspace(-1, 1.5, 60).double())
    seed, probes, steps = 4, 3, 6
    density = spectral_density(matrix, n_probes=probes, steps=steps, seed=seed)
    v = torch.randn(probes, 60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    v = v / v.norm(dim=1, keepdim=True)
    image = v
    for power in range(2 * steps):
        exact = (v * image).sum(1)
        ours = (density.weights * density.nodes**power).sum(1)
        assert torch.allclose(ours, exact, atol=1e-12)
        image = image @ matrix


def test_counts() -> None:
    values = torch.cat([torch.full((60,), 3.0).double(), torch.linspace(0, 1, 240).double()])
    density = spectral_density(dense(values), n_probes=30, steps=40)
    estimate = density.count(2, 4)
    assert estimate.low <= 60 <= estimate.high
    assert estimate.high - estimate.low < 12
    assert density.count(-1, 4).value == pytest.approx(300, rel=1e-10)
    assert density.count(5, 6).value == 0


def test_density_integrates_to_one_and_follows_the_spectrum() -> None:
    values = torch.linspace(-1, 1, 600).double()
    density = spectral_density(dense(values), n_probes=20, steps=100, width=0.05)
    assert float(torch.trapezoid(density.density, density.grid)) == pytest.approx(1, abs=1e-6)
    inside = density.density[(density.grid > -0.8) & (density.grid < 0.8)]
    assert float(inside.mean()) == pytest.approx(0.5, rel=0.05)
    assert density.applications == 20 * 100


def test_deflated_density_has_no_error_in_the_outliers() -> None:
    values = torch.cat([torch.tensor([100.0, 50, -70]).double(), torch.linspace(0, 1, 297)])
    matrix = dense(values)
    pairs = top_eigenpairs(matrix, 3, tol=1e-12)
    plain = spectral_density(matrix, n_probes=6, steps=20)
    deflated = spectral_density(matrix, n_probes=6, steps=20, deflate=pairs)
    assert deflated.atoms.tolist() == pytest.approx([100, -70, 50])
    assert float(deflated.nodes.abs().max()) < 1.0001
    assert deflated.count(40, 200).value == pytest.approx(2, abs=1e-9)
    exact = float(values.square().mean())
    error = deflated.moment(2).high - deflated.moment(2).low
    assert deflated.moment(2).value == pytest.approx(exact, abs=2 * error)
    assert error < 1e-2 * (plain.moment(2).high - plain.moment(2).low)
    assert torch.allclose(deflated.weights.sum(1), torch.full((6,), 0.99).double())
    assert float(torch.trapezoid(deflated.density, deflated.grid)) == pytest.approx(1, abs=1e-6)


def test_density_after_an_invariant_space_is_found() -> None:
    """Three distinct eigenvalues: three nodes carry all the weight, whatever ``steps`` says."""
    values = torch.tensor([0.0] * 20 + [1.0] * 15 + [5.0] * 5).double()
    density = spectral_density(dense(values), n_probes=50, steps=80)
    assert density.nodes.shape == (50, 40)
    heavy = density.nodes[density.weights > 1e-8]
    assert len(heavy) == 150
    distance = (heavy[:, None] - torch.tensor([0.0, 1, 5]).double()).abs().amin(1)
    assert float(distance.max()) < 1e-8
    estimate = density.count(4, 6)
    assert estimate.low <= 5 <= estimate.high


@pytest.mark.parametrize("value", [0.0, -2.0])
def test_density_of_a_multiple_of_the_identity(value: float) -> None:
    density = spectral_density(value * torch.eye(9).double(), n_probes=2, steps=5)
    assert density.moment(1).value == pytest.approx(value)
    assert float(torch.trapezoid(density.density, density.grid)) == pytest.approx(1, abs=1e-6)


def test_density_float32_stays_close() -> None:
    matrix = dense(torch.linspace(-1, 1, 100).double() ** 3)
    single = spectral_density(matrix.float(), n_probes=4, steps=30)
    double = spectral_density(matrix, n_probes=4, steps=30)
    for power in (1, 2, 4):
        assert single.moment(power).value == pytest.approx(double.moment(power).value, abs=1e-5)
    assert single.nodes.dtype == torch.float64


def test_bad_densities() -> None:
    for options, words in (
        ({"n_probes": 0}, "n_probes"),
        ({"steps": 0}, "steps"),
        ({"width": -1.0}, "width"),
        ({"width": math.nan}, "width"),
        ({"grid": torch.tensor([1.0, 0.0])}, "rising"),
        ({"grid": torch.tensor([1.0])}, "two places"),
        ({"deflate": top_eigenpairs(EYE, 6)}, "fewer than P"),
        ({"deflate": top_eigenpairs(torch.eye(5), 2)}, "fewer than P"),
    ):
        with pytest.raises(ValueError, match=words):
            spectral_density(EYE, **options)
    with pytest.raises(ValueError, match="NaN"):
        spectral_density(broken(math.nan))
    one = spectral_density(EYE, n_probes=1)
    with pytest.raises(ValueError, match="two probes"):
        one.moment(1)
    with pytest.raises(ValueError, match="above high"):
        one.count(2, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_equals_cpu() -> None:
    matrix = dense(outliers_and_bulk(400, 12))
    cpu = top_eigenpairs(matrix, 12, tol=1e-8)
    gpu = top_eigenpairs(matrix.cuda(), 12, tol=1e-8)
    assert gpu.vectors.is_cuda
    assert torch.allclose(gpu.values.cpu(), cpu.values, atol=1e-10)
    assert gpu.applications == cpu.applications
    on_gpu = spectral_density(matrix.cuda(), n_probes=3, steps=10, deflate=gpu)
    on_cpu = spectral_density(matrix, n_probes=3, steps=10, deflate=cpu)
    assert torch.allclose(on_gpu.nodes, on_cpu.nodes, atol=1e-6)


def test_no_warning_when_all_is_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        top_eigenpairs(dense(torch.linspace(1, 0, 60).double() ** 4), 3)


def test_unfinished_verification_is_said() -> None:
    values = outliers_and_bulk(300, 5)
    enough = top_eigenpairs(Counted(values), 5, verify=False).applications
    with pytest.warns(RuntimeWarning, match="search for missed"):
        pairs = top_eigenpairs(Counted(values), 5, max_applications=enough + 1)
    assert pairs.converged
    assert not pairs.verified


def test_largest_of_a_negative_semidefinite_operator() -> None:
    values = torch.cat([torch.zeros(3).double(), torch.linspace(-1, -4, 40)])
    pairs = top_eigenpairs(dense(values), 5, which="LA", tol=1e-8)
    assert pairs.values.tolist() == pytest.approx(values[:5].tolist(), abs=1e-7)
    assert pairs.converged
    assert math.isnan(pairs.gap)


@pytest.mark.parametrize("which", ["LM", "LA"])
@pytest.mark.parametrize("seed", range(8))
def test_small_integer_spectra_in_full(which: str, seed: int) -> None:
    """Many multiplicities, both signs, all k: the values are those of a sort."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-3, 4, (24,), generator=generator).double()
    key = values.abs() if which == "LM" else values
    for k in (1, 5, 12, 23):
        pairs = top_eigenpairs(Counted(values), k, which=which, tol=1e-6, seed=seed)
        found = pairs.values.abs() if which == "LM" else pairs.values
        assert torch.allclose(found, key.sort(descending=True)[0][:k], atol=1e-5)
