"""Outputs with any target loss: against hand counts, a plain minimiser and the multi-class case."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from proofread.linear_core import LinearCore
from proofread.linear_core.multiclass import least_regret, sum_optimum
from proofread.linear_core.outputs import (
    attack_outputs,
    certified_exchange,
    constrained_ratio,
    disfavoured_tag,
    hamming_losses,
    sum_form_ratio,
)
from proofread.linear_core.structured import enumerate_sequences

TAILS = ("exponential", "gamma", "logistic")


def test_hamming_by_hand_and_in_the_order_of_the_enumeration() -> None:
    # 00, 01, 10, 11
    assert hamming_losses(2, 2).tolist() == [[0, 1, 1, 2], [1, 0, 2, 1], [1, 2, 0, 1], [2, 1, 1, 0]]
    sequences = enumerate_sequences(3, 3).numpy()
    count = (sequences[:, None] != sequences).sum(2)
    assert (hamming_losses(3, 3) == count).all()


def test_the_exchange_is_certified() -> None:
    assert certified_exchange() == 1.0


@pytest.mark.parametrize("tail", TAILS)
def test_ratio_against_a_plain_minimiser(tail: str) -> None:
    """Minimise Σ q·Φ(-h̃) with scipy, free and with a given top score."""
    phi, losses, k = LinearCore(0.7, 1.3, tail), hamming_losses(2, 2), 2
    p = np.array([0.5, 0.2, 0.1, 0.2])
    q = losses @ p

    def risk(h: np.ndarray) -> float:
        return float((q * phi(-(h - h.mean()))).sum())

    options = {"maxiter": 4000, "ftol": 1e-15}
    free = minimize(risk, np.zeros(4), method="SLSQP", options=options).fun
    top = [{"type": "ineq", "fun": lambda h, j=j: h[k] - h[j]} for j in range(4) if j != k]
    tied = minimize(risk, np.zeros(4), method="SLSQP", constraints=top, options=options).fun
    expected = (tied - free) / (0.7 * (q[k] - q.min()))
    assert constrained_ratio(p, losses, k, phi) == pytest.approx(expected, rel=1e-5)


def test_classes_are_the_zero_one_case() -> None:
    p, phi = np.array([0.5, 0.3, 0.2]), LinearCore(1.5, 0.4)
    expected = least_regret(p, 1, phi) / (1.5 * 0.2)
    assert constrained_ratio(p, 1 - np.eye(3), 1, phi) == pytest.approx(expected)
    sums = sum_optimum(p, phi, 1) - sum_optimum(p, phi)
    assert sum_form_ratio(p, 1 - np.eye(3), 1, phi) == pytest.approx(sums / (1.5 * 0.2), rel=1e-6)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("losses", [1 - np.eye(3), hamming_losses(2, 3)])
def test_no_attack_gets_below_one(tail: str, losses: np.ndarray) -> None:
    assert attack_outputs(LinearCore(tail=tail), losses, trials=400) >= 1


def test_a_disfavoured_tag_is_nine_sevenths_in_the_limit() -> None:
    """K = 3, T = 2. In units of ε the predicted sequence, which costs 1, pools with the six good
    ones, which cost 0, at 1/7 > 0. So λ rises by 1/7, and 9·τ·λ by 9/7."""
    p = disfavoured_tag(2, 3, 1e-6)
    assert p.sum() == pytest.approx(1)
    ratio = constrained_ratio(p, hamming_losses(2, 3), 0, LinearCore())
    assert ratio == pytest.approx(9 / 7, rel=1e-4)


def test_sum_form_is_quadratic_for_sequences_too() -> None:
    def ratio(delta: float) -> float:
        p = [(0.9 + delta) / 2, (0.9 - delta) / 2, 0.05, 0.05]
        return sum_form_ratio(p, hamming_losses(2, 2), 1, LinearCore())

    assert ratio(0.01) < 0.2
    assert ratio(0.005) / ratio(0.01) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hamming_losses(0, 2), "length"),
        (lambda: hamming_losses(13, 2), "4096"),
        (lambda: disfavoured_tag(2, 2, 0.5), "epsilon"),
        (lambda: attack_outputs(LinearCore(), np.eye(2), trials=1), "trials"),
        (lambda: constrained_ratio([0.5, 0.5], np.eye(3), 0, LinearCore()), "losses"),
        (lambda: constrained_ratio([0.6, 0.4], 1 - np.eye(2), 0, LinearCore()), "positive"),
        (lambda: sum_form_ratio([1.0, 0.0], 1 - np.eye(2), 1, LinearCore()), "zeros"),
        (lambda: sum_form_ratio([0.6, 0.4], 1 - np.eye(2), 0, LinearCore()), "no target regret"),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_outputs_out_of_range_are_refused() -> None:
    law, losses = [0.4, 0.3, 0.2, 0.1], hamming_losses(2, 2)
    for k in (-1, 4):
        with pytest.raises(IndexError, match="predicted"):
            sum_form_ratio(law, losses, k, LinearCore())
        with pytest.raises(IndexError, match="predicted"):
            constrained_ratio(law, losses, k, LinearCore())
    with pytest.raises(TypeError, match="integer"):
        constrained_ratio(law, losses, 2.9, LinearCore())
