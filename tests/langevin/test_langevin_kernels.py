"""The Langevin kernel, in the interpreter or compiled on a GPU: its noise against Philox written
out in numpy and against the normal law, its steps against a loop that takes the same noise. Results
start as NaNs between guards, so that a number nobody wrote shows."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, softmax
from scipy.stats import kstest
from torch import Tensor

from proofread.triton_support import compile_reports, interpreting

pytest.importorskip("triton")
from proofread.langevin import kernels
from proofread.langevin.kernels import (
    GAUSSIAN,
    KERNELS,
    MAX_DIMENSION,
    MIXTURE,
    TRAP,
    langevin_triton,
    launch_plan,
    step_cost,
    takes,
)
from proofread.langevin.scores import GaussianScore, MixtureScore, RadialLaw, RadialScore, TrapScore

Floats = NDArray[np.float64]
GUARD = 64
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
ROUNDING = 3e-6  # of float32 noise, the approximate square root of a GPU included

interpreted = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
DEVICES = (
    pytest.param("cpu", marks=interpreted, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
)
on_devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


STANDARD = RadialLaw(GAUSSIAN, (0.0, 1.0))


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    buffers: list[Tensor] = []

    def empty(like: Tensor) -> Tensor:
        buffer = like.new_full((like.numel() + 2 * GUARD,), 123.0)
        buffer[GUARD:-GUARD] = math.nan
        buffers.append(buffer)
        return buffer[GUARD:-GUARD].view(like.shape)

    monkeypatch.setattr(kernels, "_empty", empty)
    yield
    for buffer in buffers:
        assert (buffer[:GUARD] == 123).all(), "written before the beginning of a buffer"
        assert (buffer[-GUARD:] == 123).all(), "written past the end of a buffer"


def run(x: Tensor, law: RadialLaw, step: float = 0.01, n_steps: int = 1, **more: Any) -> Tensor:
    """With the axis in a direction of its own and the origin off 0, unless the test says."""
    d = x.shape[1]
    arguments: dict[str, Any] = {"axis": axis_of(d), "origin": origin_of(d), "seed": 5} | more
    axis, origin, seed = (arguments.pop(name) for name in ("axis", "origin", "seed"))
    return langevin_triton(x, law, axis, origin, step, n_steps, seed, **arguments)


def axis_of(d: int) -> Tensor:
    weights = torch.cos(torch.arange(d, dtype=torch.float64)) + 0.1
    return weights / weights.norm()


def origin_of(d: int) -> Tensor:
    return 0.3 * torch.sin(3 * torch.arange(d, dtype=torch.float64))


@functools.cache
def noise(
    n_chains: int, d: int, n_steps: int, *, device: str = "cpu", seed: int = 5, first: int = 0
) -> Floats:
    """``[n_steps, C, d]``: with score −x from 0 and h = ½, a step leaves its noise, unrounded."""
    zero = torch.zeros(n_chains, d, dtype=torch.float64, device=device)
    one = [
        run(zero, STANDARD, 0.5, seed=seed, first_step=first + t, origin=torch.zeros(d))
        for t in range(n_steps)
    ]
    return torch.stack(one).cpu().numpy()


# --- naive twins ----------------------------------------------------------------------------------


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox-4x32-10 of Salmon, Moraes, Dror and Shaw (2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32
        c2, c3 = (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def normal_pair(a: int, b: int) -> tuple[float, float]:
    """Box–Muller: radius from ``a``; angle in [−π/4, π/4), reflection and sign from ``b``."""
    radius = math.sqrt(-2 * math.log((a + 0.5) / 2**32))
    signed = (b << 2) % 2**32
    angle = (signed - 2**32 * (signed >= 2**31)) / 2**31 * math.pi / 4
    x, y = math.cos(angle), math.sin(angle)
    if b >> 30 & 1:
        x, y = y, x
    sign = -1 if b >> 31 else 1
    return sign * radius * x, sign * radius * y


def normal(seed: int, step: int, chain: int, dimension: int) -> float:
    """The normal of one dimension of one chain at one step."""
    counter = (dimension // 4, step % 2**32, step >> 32, chain)
    words = philox(counter, (seed % 2**32, seed >> 32))
    q = dimension % 4
    return normal_pair(*words[2 * (q // 2) : 2 * (q // 2) + 2])[q % 2]


def coefficients(law: RadialLaw, u: float, w: float) -> tuple[float, float]:
    """pull and push by the definition of each law."""
    p = law.parameters
    if law.kind == GAUSSIAN:
        m, variance = p
        return 1 / variance, m / variance
    if law.kind == TRAP:
        m, alpha, inner, outer = p
        psi = min(1.0, max(0.0, (outer - math.sqrt(u * u + w)) / (outer - inner)))
        return 1 + psi * (alpha - 1), (1 - psi) * m
    log_weights, positions, variances = np.reshape(p[1:], (3, int(p[0])))
    shares = softmax(log_weights - ((u - positions) ** 2 + w) / (2 * variances))
    return float((shares / variances).sum()), float((shares * positions / variances).sum())


def replay(x: Floats, law: RadialLaw, step: float, xi: Floats) -> Floats:
    """The chains by a loop in float64, with noise ``[n_steps, C, d]``."""
    axis, origin = axis_of(x.shape[1]).numpy(), origin_of(x.shape[1]).numpy()
    x = x.copy()
    for z in xi:
        for c in range(len(x)):
            y = x[c] - origin
            u = float(axis @ y)
            pull, push = coefficients(law, u, float(((y - u * axis) ** 2).sum()))
            x[c] += step * (-pull * y + push * axis) + math.sqrt(2 * step) * z[c]
    return x


def mixture(d: int, *components: tuple[float, float, float]) -> RadialLaw:
    """From (weight, position, variance) each."""
    logs = tuple(math.log(w) - d / 2 * math.log(v) for w, _, v in components)
    positions, variances = tuple(m for _, m, _ in components), tuple(v for _, _, v in components)
    return RadialLaw(MIXTURE, (len(components), *logs, *positions, *variances))


LAWS: dict[str, Callable[[int], RadialLaw]] = {
    "Gaussian": lambda d: RadialLaw(GAUSSIAN, (2.0, 0.7)),
    "trap": lambda d: RadialLaw(
        TRAP, (1.5 * math.sqrt(d), 4.0, 0.8 * math.sqrt(d), 1.3 * math.sqrt(d))
    ),
    "one component": lambda d: mixture(d, (1.0, -1.0, 2.0)),
    "equal variances": lambda d: mixture(d, (0.3, -1.0, 1.0), (0.7, 2.0, 1.0)),
    "three components": lambda d: mixture(d, (0.2, 0.0, 1.0), (0.3, 3.0, 1.1), (0.5, -2.0, 0.9)),
    "eight components": lambda d: mixture(d, *((k + 1.0, k - 3.5, 1 + k / 50) for k in range(8))),
}
laws = pytest.mark.parametrize("law", LAWS.values(), ids=list(LAWS))


def states(n_chains: int, d: int, seed: int = 0) -> Tensor:
    """Points at radii from 0.3√d to 2√d around the origin, float64: in every zone of the traps."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randn(n_chains, d, generator=g, dtype=torch.float64)
    y = y / y.norm(dim=1, keepdim=True) * math.sqrt(d)
    return origin_of(d) + torch.linspace(0.3, 2.0, n_chains, dtype=torch.float64)[:, None] * y


# --- noise ----------------------------------------------------------------------------------------


def test_philox_written_out_gives_the_authors_words() -> None:
    """Known answers that come with the authors' library."""
    zero = philox((0, 0, 0, 0), (0, 0))
    assert zero == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    pi = philox((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    assert pi == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@on_devices
@pytest.mark.parametrize(
    ("seed", "step", "chain"),
    [
        (0, 0, 0),
        (5, 7, 11),
        (2**63 - 1, 2**31, 2**31 - 2),  # beyond signed 32 bits
        (2**40 + 1, 2**32 + 3, 2**32 - 8),  # words on both sides; the last chains there are
        (2**32, 2**62, 2**31 + 1),
    ],
)
def test_noise_is_philox_and_box_muller(seed: int, step: int, chain: int, device: str) -> None:
    d, c = 11, 5
    zero = torch.zeros(c, d, dtype=torch.float64, device=device)
    found = run(
        zero,
        STANDARD,
        0.5,
        2,
        seed=seed,
        first_step=step,
        first_chain=chain,
        origin=torch.zeros(d),
    ).cpu()
    # x' = x/2 + ξ from the first step's ξ
    rows = [
        [
            normal(seed, step, chain + i, j) / 2 + normal(seed, step + 1, chain + i, j)
            for j in range(d)
        ]
        for i in range(c)
    ]
    right = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(found, right, rtol=ROUNDING, atol=ROUNDING)


@on_devices
def test_noise_is_normal_and_uncorrelated(device: str) -> None:
    """Kolmogorov–Smirnov of all numbers, of their squares' sums, and every correlation between
    dimensions, steps and chains within 5 standard deviations."""
    t, c, d = 10, 64, 48
    z = noise(c, d, t, device=device)
    assert kstest(z.ravel(), ndtr).pvalue > 0.01
    assert abs(z.mean()) * math.sqrt(z.size) < 4
    assert abs((z**2).mean() - 1) * math.sqrt(z.size / 2) < 4
    assert abs((z**4).mean() - 3) * math.sqrt(z.size / 96) < 4
    for rows in (z.reshape(t * c, d), z.reshape(t, c * d).T, z.transpose(0, 2, 1).reshape(-1, c)):
        for power in (1, 2):  # squares too: a pair of one radius and one angle is independent
            r = np.corrcoef(rows**power, rowvar=False)
            np.fill_diagonal(r, 0)
            assert np.abs(r).max() < 5 / math.sqrt(len(rows))


@on_devices
def test_no_number_comes_twice(device: str) -> None:
    """Steps, chains, dimensions and seeds that differ in one bit, high or low."""
    firsts = (0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**62)
    seen = [noise(16, 16, 1, device=device, first=first) for first in firsts]
    seen += [noise(16, 16, 1, device=device, seed=seed) for seed in (4, 5 + 2**32, 5 + 2**62)]
    numbers = np.concatenate(seen).ravel()
    # float32 numbers of a coarse grid may meet by chance: whole groups of four may not
    assert len(np.unique(numbers.reshape(-1, 4), axis=0)) == numbers.size // 4
    assert len(np.unique(np.abs(numbers))) > 0.99 * numbers.size


# --- distribution ---------------------------------------------------------------------------------


@on_devices
@dtypes
def test_gaussian_law_after_many_steps(dtype: torch.dtype, device: str) -> None:
    """Mean and variance by their exact recursions, from a point, and the law by
    Kolmogorov–Smirnov."""
    c, d, k, h, m, v = 40, 36, 20, 0.2, 3.0, 0.5
    start = torch.full((c, d), 2.0, dtype=dtype, device=device)
    end = run(start, RadialLaw(GAUSSIAN, (m, v)), h, k, seed=1).double().cpu().numpy()
    mean, variance = np.full(d, 2.0), 0.0
    target = origin_of(d).numpy() + m * axis_of(d).numpy()
    for _ in range(k):
        mean = mean - h * (mean - target) / v
        variance = (1 - h / v) ** 2 * variance + 2 * h
    z = (end - mean) / math.sqrt(variance)
    assert kstest(z.ravel(), ndtr).pvalue > 0.01
    assert abs(z.mean()) * math.sqrt(z.size) < 4
    assert abs((z**2).mean() - 1) * math.sqrt(z.size / 2) < 4
    assert abs(variance - v / (1 - h / (2 * v))) < 1e-9  # the biased limit of the discretisation


# --- steps ----------------------------------------------------------------------------------------


@on_devices
@laws
@pytest.mark.parametrize("d", [1, 2, 20, 63])
def test_steps_equal_a_loop_with_the_same_noise(
    d: int, law: Callable[[int], RadialLaw], device: str
) -> None:
    c, k, h = 8, 5, 0.02
    x, xi = states(c, d), noise(c, d, k, device=device)
    found = run(x.to(device), law(d), h, k).cpu().numpy()
    right = replay(x.numpy(), law(d), h, xi)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-12 * np.abs(right).max())


@on_devices
@pytest.mark.parametrize("name", ["Gaussian", "trap", "mixture"])
def test_scores_of_the_package(name: str, device: str) -> None:
    """A step with a score's own law, axis and origin is ``x + h·score(x) + √(2h)·noise``."""
    d, h = 6, 0.05
    mean, means = torch.linspace(0.5, 2.0, d), torch.arange(2.0 * d).view(2, d) / d
    score: RadialScore = {
        "Gaussian": lambda: GaussianScore(mean, 1.5),
        "trap": lambda: TrapScore(4 * mean, 3.0, 0.8, 1.3, centre=-mean),
        "mixture": lambda: MixtureScore(means, [1.0, 1.3], [0.4, 0.6]),
    }[name]()
    x = -mean + states(6, d) - origin_of(d)
    xi = torch.tensor(noise(6, d, 1, device=device)[0])
    right = x + h * score(x) + math.sqrt(2 * h) * xi
    found = run(x.to(device), score.law, h, axis=score.axis, origin=score.origin)
    torch.testing.assert_close(found.cpu(), right, rtol=1e-12, atol=1e-12)


@on_devices
@laws
@pytest.mark.parametrize("d", [7, 64])
def test_float32_follows_float64(d: int, law: Callable[[int], RadialLaw], device: str) -> None:
    """One noise for both: the paths part by rounding alone."""
    x = states(8, d).to(device)
    right = run(x, law(d), 0.02, 3)
    found = run(x.float(), law(d), 0.02, 3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-5 * float(right.abs().max()))


def test_every_zone_of_the_trap_is_replayed() -> None:
    law = LAWS["trap"](20)
    radii = (states(9, 20) - origin_of(20)).norm(dim=1) / math.sqrt(20)
    _, _, inner, outer = (p / math.sqrt(20) for p in law.parameters)
    assert (radii < inner).any()
    assert (radii > outer).any()
    assert ((radii > inner) & (radii < outer)).sum() >= 2


@on_devices
@dtypes
def test_components_far_apart(dtype: torch.dtype, device: str) -> None:
    """Shares that underflow, exponents of thousands: each chain stays with its component."""
    d, far = 40, 300.0
    law = mixture(d, (0.5, -far, 1.0), (0.5, far, 1.0))
    x = torch.stack([-far * axis_of(d), far * axis_of(d)]).to(device, dtype) + origin_of(d).to(
        device, dtype
    )
    end = run(x, law, 0.1, 20)
    u = (end.cpu().double() - origin_of(d)) @ axis_of(d)
    assert torch.allclose(u, torch.tensor([-far, far], dtype=torch.float64), atol=6.0)
    middle = run(origin_of(d).to(device, dtype)[None], law, 1e-3, 1) - origin_of(d).to(device)
    assert middle.isfinite().all()


@on_devices
def test_one_component_is_the_gaussian(device: str) -> None:
    x = states(6, 10).to(device)
    one, gaussian = mixture(10, (1.0, 2.0, 0.7)), RadialLaw(GAUSSIAN, (2.0, 0.7))
    torch.testing.assert_close(
        run(x, one, 0.1, 6), run(x, gaussian, 0.1, 6), rtol=1e-12, atol=1e-12
    )


# --- batches, launches, memory --------------------------------------------------------------------


@on_devices
@dtypes
@pytest.mark.parametrize("name", ["trap", "three components"])
@pytest.mark.parametrize("d", [3, 130])
def test_neither_batches_nor_launches_matter(
    d: int, name: str, dtype: torch.dtype, device: str
) -> None:
    """Bit by bit: chains in two calls, steps in two calls."""
    law, x = LAWS[name](d), states(4, d).to(device, dtype)
    whole = run(x, law, 0.02, 4, first_step=9, first_chain=100)
    parts = [
        run(x[:1], law, 0.02, 4, first_step=9, first_chain=100),
        run(x[1:], law, 0.02, 4, first_step=9, first_chain=101),
    ]
    assert torch.equal(torch.cat(parts), whole)
    half = run(x, law, 0.02, 1, first_step=9, first_chain=100)
    assert torch.equal(run(half, law, 0.02, 3, first_step=10, first_chain=100), whole)


@on_devices
def test_chains_of_several_programs(device: str) -> None:
    """More chains than one program takes, and not a multiple."""
    d, plan = 16, launch_plan(16, torch.float32)
    x = states(2 * plan.chains + 3, d).float().to(device)
    whole = run(x, LAWS["trap"](d), 0.02, 2)
    for c in (0, plan.chains - 1, plan.chains, len(x) - 1):
        alone = run(x[c : c + 1], LAWS["trap"](d), 0.02, 2, first_chain=c)
        assert torch.equal(alone[0], whole[c])


@on_devices
@dtypes
def test_strides_and_alignment(dtype: torch.dtype, device: str) -> None:
    """Also from an address that is no multiple of 16 bytes; the input stays as it was."""
    x = states(6, 12).to(device, dtype)
    law = LAWS["three components"](12)
    right = run(x, law, 0.02, 3)
    shifted = torch.empty(6 * 12 + 1, dtype=dtype, device=device)[1:].view(6, 12).copy_(x)
    assert shifted.data_ptr() % 16
    odd = (x.t().contiguous().t(), x.repeat_interleave(2, 1)[:, ::2], shifted)
    before = x.clone()
    assert all(torch.equal(run(other, law, 0.02, 3), right) for other in odd)
    assert torch.equal(run(x, law, 0.02, 3), right)
    assert torch.equal(x, before)
    axis = axis_of(12).repeat_interleave(3)[::3]
    assert torch.equal(run(x, law, 0.02, 3, axis=axis.to(device)), right)


@on_devices
def test_nothing_to_do(device: str) -> None:
    assert run(torch.zeros(0, 5, device=device), STANDARD, 0.1, 3).shape == (0, 5)
    x = states(3, 5).to(device)
    same = run(x, STANDARD, 0.1, 0)
    assert torch.equal(same, x)
    assert same.data_ptr() != x.data_ptr()


@on_devices
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize(
    ("name", "bad"), [*((name, math.nan) for name in LAWS), ("trap", math.inf)]
)
def test_not_a_number_shows_and_stays_in_its_chain(name: str, bad: float, device: str) -> None:
    x = states(6, 8).to(device)
    right = run(x, LAWS[name](8), 0.02, 3)
    x[2, 5] = bad
    found = run(x, LAWS[name](8), 0.02, 3)
    assert not found[2].isfinite().all()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(found[rest], right[rest])


@on_devices
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_step_too_large_ends_in_no_number(device: str) -> None:
    assert not run(states(3, 4).float().to(device), STANDARD, 50.0, 60).isfinite().any()


# --- errors ---------------------------------------------------------------------------------------

GOOD = RadialLaw(TRAP, (1.0, 2.0, 0.5, 1.0))
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "half precision": ({"x": torch.zeros(2, 3).half()}, TypeError, "x must be float32 or float64"),
    "one chain": ({"x": torch.zeros(3)}, ValueError, r"x must be \[C, d\]"),
    "no dimension": ({"x": torch.zeros(2, 0)}, ValueError, "1 ≤ d ≤ 4096"),
    "too many": ({"x": torch.zeros(0, 4097)}, ValueError, "use the torch path"),
    "axis": ({"axis": torch.zeros(4)}, ValueError, r"axis must be \[3\]"),
    "origin": ({"origin": torch.zeros(1, 3)}, ValueError, r"origin must be \[3\]"),
    "step": ({"step": 0.0}, ValueError, "step must be positive"),
    "step NaN": ({"step": math.nan}, ValueError, "step must be positive"),
    "n_steps": ({"n_steps": -1}, ValueError, "n_steps must be at least 0"),
    "seed": ({"seed": -1}, ValueError, "seed must be at least 0"),
    "seed too large": ({"seed": 2**63}, ValueError, "seed must be"),
    "first_step": ({"first_step": 2**63 - 1}, ValueError, r"their sum below 2\*\*63"),
    "first_chain": ({"first_chain": 2**32 - 1}, ValueError, r"their sum below 2\*\*32"),
    "negative chain": ({"first_chain": -1}, ValueError, "first_chain"),
    "kind": ({"law": RadialLaw(3, (1.0, 2.0))}, ValueError, "law must be Gaussian"),
    "variance": ({"law": RadialLaw(GAUSSIAN, (0.0, 0.0))}, ValueError, "variance > 0"),
    "radii": ({"law": RadialLaw(TRAP, (1.0, 2.0, 1.0, 1.0))}, ValueError, "inner < outer"),
    "lengths": ({"law": RadialLaw(MIXTURE, (2, 0.0, 0.0, 1.0))}, ValueError, "mixture"),
    "no components": ({"law": RadialLaw(MIXTURE, ())}, ValueError, "mixture"),
    "NaN": ({"law": RadialLaw(TRAP, (1.0, math.nan, 0.5, 1.0))}, ValueError, "must be finite"),
}


@interpreted
@pytest.mark.parametrize(("change", "error", "says"), WRONG.values(), ids=list(WRONG))
def test_errors_come_before_the_launch(
    change: dict[str, Any], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_kernel", None)
    good: dict[str, Any] = {"x": torch.zeros(2, 3), "law": GOOD}
    good |= {"axis": axis_of(3), "origin": origin_of(3), "step": 0.1, "n_steps": 1, "seed": 0}
    with pytest.raises(error, match=says):
        langevin_triton(**(good | change))


def test_what_the_kernel_takes() -> None:
    assert takes(1)
    assert takes(4096)
    assert not takes(4097)
    assert takes(4096, torch.float64)
    assert not takes(4097, torch.float64)
    assert not takes(0)
    assert not takes(8, torch.float16)


# --- counts ---------------------------------------------------------------------------------------


@interpreted
@dtypes
@pytest.mark.parametrize("name", ["Gaussian", "trap", "three components"])
@pytest.mark.parametrize(("c", "d"), [(9, 37), (3, 300)])
def test_counted_bytes_are_the_requested_bytes(
    c: int, d: int, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count every lane that the interpreter loads or stores under an active mask."""
    from triton.runtime import interpreter

    moved = [0]
    builder = type(interpreter.interpreter_builder)

    def counting(name: str, mask_at: int) -> None:
        original = getattr(builder, name)

        def wrapper(self: Any, ptrs: Any, *rest: Any) -> Any:
            lanes = int(rest[mask_at].data.sum())
            moved[0] += lanes * (ptrs.dtype.element_ty.primitive_bitwidth // 8)
            return original(self, ptrs, *rest)

        monkeypatch.setattr(builder, name, wrapper)

    counting("create_masked_load", 0)
    counting("create_masked_store", 1)
    law = LAWS[name](d)
    run(states(c, d).to(dtype), law, 0.02, 2)
    assert moved[0] == step_cost(c, d, 2, law.kind, dtype, n_components=3).requested_bytes


def test_counts_by_hand() -> None:
    """4096 chains of 1024 dimensions, 1000 steps, float32."""
    c, d, k = 4096, 1024, 1000
    cost = step_cost(c, d, k, GAUSSIAN)
    assert cost.element_steps == c * d * k
    assert cost.fused_bytes / cost.element_steps == 8 / k
    assert cost.unfused_bytes / cost.element_steps == 44
    assert step_cost(c, d, k, TRAP).unfused_bytes / cost.element_steps == 48
    assert step_cost(c, d, k, MIXTURE).unfused_bytes / cost.element_steps == 52
    assert cost.philox_calls == c * d * k // 4  # a power of two: no idle lane
    assert cost.integer_products == cost.exclusive_ors == 5 * cost.element_steps
    assert cost.special_functions == cost.element_steps
    double = step_cost(c, d, k, GAUSSIAN, torch.float64)
    assert double.fused_bytes == 2 * cost.fused_bytes
    assert double.philox_calls == cost.philox_calls
    assert step_cost(1, 784, 1).philox_calls == 256  # 196 groups of four, rounded up


# --- machine code ---------------------------------------------------------------------------------


def test_machine_code() -> None:
    """Nothing spills, states move 128 bits at a time where d allows, and steps use memory only for
    sums. One test: the cases take one process to compile."""
    made = iter(compile_reports(KERNELS, capabilities=(80, 90)))
    for spec in KERNELS:
        at = spec.constexprs
        item = int(spec.signature["x"][-2:]) // 8
        numbers = 4 * at["LANES"] * at["CHAINS"]  # of a program
        accesses = numbers * item // (16 * 32 * spec.num_warps)  # of a thread, at full width
        for report in (next(made), next(made)):
            assert not report.spills, report
            assert report.shared_bytes <= 2 * 8 * 32  # one number a warp for each of the sums
            if at["VEC"] * item == 16:
                assert report.global_stores == {128: accesses}
                assert report.global_loads[128] >= accesses + 2
                assert set(report.global_loads) <= {64, 128}  # 64: the law's parameters
            mixture = at["LAW"] == MIXTURE and item == 4  # exponentials of float64 are made in code
            assert bool(report.exponentials) == mixture


def test_table_covers_laws_types_and_limits() -> None:
    kinds = {(spec.constexprs["LAW"], spec.signature["x"]) for spec in KERNELS}
    wanted = {(TRAP, "*fp64"), (MIXTURE, "*fp64")}
    assert kinds >= wanted | set(itertools.product((GAUSSIAN, TRAP, MIXTURE), ("*fp32",)))
    for name in ("*fp32", "*fp64"):
        most = max(s.constexprs["LANES"] for s in KERNELS if s.signature["x"] == name)
        assert 4 * most == MAX_DIMENSION
    assert any(spec.constexprs["VEC"] == 1 for spec in KERNELS)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_plans_fit(dtype: torch.dtype) -> None:
    for d in (1, 2, 3, 4, 5, 63, 64, 65, 1000, 1024, 1025, 2049, 4096):
        plan = launch_plan(d, dtype)
        assert d <= 4 * plan.lanes < max(8 * d, 8)
        assert d % plan.vec == 0
        assert plan.vec * dtype.itemsize <= 16
        assert 4 <= plan.chains * 4 * plan.lanes / (32 * plan.num_warps) <= 16


@pytest.mark.gpu
def test_one_compilation_for_all_numbers() -> None:
    """Other parameters, steps, seeds, numbers of chains and components: the same machine code."""
    x = states(32, 64).float().cuda()

    def compiled() -> int:
        return sum(len(cache[0]) for cache in kernels._kernel.device_caches.values())

    run(x, LAWS["equal variances"](64), 0.01, 3)
    before = compiled()
    for c, name, step, k, seed in (
        (1, "one component", 0.02, 1, 1),
        (16, "three components", 1.0, 16, 2**62),
        (31, "eight components", 1e-3, 7, 0),
    ):
        run(x[1 : 1 + c], LAWS[name](64), step, k, seed=seed, first_step=2**40, first_chain=16)
    assert compiled() == before
