"""BOME on problems with known answers; no model anywhere. The numbers come from the closed forms in the docstrings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.training.bilevel.bome import Bome
from components.training.parameter_space import BlockVector, TorchSpace, block_groups

A, C, D, RHO = 2.0, 1.0, 0.0, 0.5


def quadratic(v0: float, theta0: float, rate: float, **options) -> tuple[Bome, torch.Tensor, torch.Tensor]:
    """g = (theta - a v)^2 / 2, f = (theta - c)^2 / 2 + rho (v - d)^2 / 2, in float64."""
    v = torch.tensor([v0], dtype=torch.float64)
    theta = torch.tensor([theta0], dtype=torch.float64)
    space = make_space({"v": v}, {"theta": theta}, rate)
    bome = Bome(space, **options)
    bome.problem = (
        lambda: (0.5 * (theta - C) ** 2 + 0.5 * RHO * (v - D) ** 2).sum(),
        lambda: (0.5 * (theta - A * v) ** 2).sum(),
    )
    return bome, v, theta


def make_space(alpha: dict, theta: dict, rate: float) -> TorchSpace:
    return TorchSpace(alpha, theta, torch.optim.SGD(block_groups(alpha, theta), lr=rate))


class TestScalarQuadratic:
    @pytest.mark.parametrize(
        ("inner_rate", "steps", "expected"),
        [(0.1, 1, 0.2222), (0.1, 5, 0.3831), (0.1, 10, 0.4195), (1.0, 1, 0.4444), (0.5, 10, 0.4444)],
    )
    def test_reaches_the_limit_point_of_finite_inner_steps(self, inner_rate, steps, expected):
        """With r = (1 - a_in)^T the limit is v_T = (a (1 - r) c + rho d) / (a^2 (1 - r) + rho), theta = a v_T.

        T = 5, a_in = .1: r = .59049, v_T = 2 * .40951 / (4 * .40951 + .5) = .38310. A solver that lets the gradient
        flow through theta_T, or drops grad_v g(v, theta_T), lands on v* = .4444 at every T.
        """
        bome, v, theta = quadratic(3.0, -2.0, 0.1, inner_steps=steps, inner_rate=inner_rate, eta=0.5, epsilon=1e-12)
        for _ in range(2000):
            bome.step(*bome.problem)
        r = (1 - inner_rate) ** steps
        limit = (A * (1 - r) * C + RHO * D) / (A**2 * (1 - r) + RHO)
        assert limit == pytest.approx(expected, abs=5e-5)
        assert v.item() == pytest.approx(limit, abs=5e-5)
        assert theta.item() == pytest.approx(A * limit, abs=1e-4)

    def test_one_step_from_a_worked_start(self):
        """From (3, -2), T = 5, a_in = .1, eta = .5, xi = .01, epsilon = 0:

        theta_T = 6 + (-2 - 6) * .9^5 = 1.27608; grad_theta q = theta - 2v = -8;
        grad_v q = -2 (theta - 2v) + 2 (theta_T - 2v) = 16 - 9.44784 = 6.55216; grad f = (1.5, -3);
        |grad q|^2 = 106.9308, <grad f, grad q> = 33.82824; lambda = .5 - 33.82824 / 106.9308 = .1836436.
        """
        bome, v, theta = quadratic(3.0, -2.0, 0.01, inner_steps=5, inner_rate=0.1, epsilon=0.0)
        state = bome.step(*bome.problem)
        assert state.lam == pytest.approx(0.1836436, abs=1e-7)
        assert state.residual == pytest.approx(0.5 * 64 - 0.5 * (1.27608 - 6) ** 2, abs=1e-4)
        assert v.item() == pytest.approx(2.9729674, abs=1e-7)
        assert theta.item() == pytest.approx(-1.9553085, abs=1e-7)

    def test_one_step_where_the_condition_already_holds(self):
        """From (1, 3) grad f already lowers q fast enough: lambda = 0 and the step is -xi grad f = -(.5, 2) / 100."""
        bome, v, theta = quadratic(1.0, 3.0, 0.01, inner_steps=5, inner_rate=0.1, epsilon=0.0)
        state = bome.step(*bome.problem)
        assert state.lam == 0.0
        assert (v.item(), theta.item()) == pytest.approx((0.995, 2.98), abs=1e-12)

    def test_phi_as_residual(self):
        """phi = eta q: lambda = (.5 * q - <grad f, grad q>) / |grad q|^2, q = 32 - (1.27608 - 6)^2 / 2 = 20.8423.

        q / 2 = 10.42 < 33.83, so lambda = 0; at eta = 5 it is (104.2114 - 33.82824) / 106.9308 = .658.
        """
        for eta, expected in [(0.5, 0.0), (5.0, (5 * (32 - 0.5 * (1.27608 - 6) ** 2) - 33.82828) / 106.93080)]:
            bome, *_ = quadratic(3.0, -2.0, 0.01, inner_steps=5, inner_rate=0.1, epsilon=0.0, phi="residual", eta=eta)
            assert bome.step(*bome.problem).lam == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("inner_steps", [1, 10])
@pytest.mark.parametrize("start", [(5.0, 5.0, 0.0), (3.0, -2.0, 4.0)])
def test_lower_level_with_many_solutions(start, inner_steps):
    """f = (w - x2)^2 / 2 + (x1 - 1)^2 / 2, g = x1^2 / 2 - w x1 (authors' toy). Solution x = (1, 1), w = 1, f = 0."""
    x = torch.tensor(start[:2], dtype=torch.float64)
    w = torch.tensor(start[2:], dtype=torch.float64)
    bome = Bome(make_space({"w": w}, {"x": x}, 0.5), inner_steps=inner_steps, inner_rate=0.5, epsilon=1e-12)
    for _ in range(2000):
        bome.step(lambda: 0.5 * (w[0] - x[1]) ** 2 + 0.5 * (x[0] - 1) ** 2, lambda: 0.5 * x[0] ** 2 - w[0] * x[0])
    assert torch.cat([x, w]).tolist() == pytest.approx([1.0, 1.0, 1.0], abs=1e-7)


def test_coreset_toy_finds_the_projection_on_the_hull():
    """f = .1 |x - x0|^2, g = |x - sum softmax(w)_i c_i|^2 (authors' toy), x0 = (3, -2).

    The hull's edge from (3, 1) to (-3, -2) is nearest: its projection of x0 is (1.8, .4), f* = .72, approached since
    softmax never reaches the edge.
    """
    x0 = torch.tensor([3.0, -2.0], dtype=torch.float64)
    corners = torch.tensor([[1.0, 3.0], [3.0, 1.0], [-2.0, 2.0], [-3.0, -2.0]], dtype=torch.float64)
    w = torch.zeros(4, dtype=torch.float64)
    x = torch.tensor([0.0, 3.0], dtype=torch.float64)
    bome = Bome(make_space({"w": w}, {"x": x}, 0.05), inner_steps=10, inner_rate=0.05, eta=0.5, epsilon=1e-4)
    for _ in range(5000):
        bome.step(lambda: 0.1 * ((x - x0) ** 2).sum(), lambda: ((x - torch.softmax(w, 0) @ corners) ** 2).sum())
    assert x.tolist() == pytest.approx([1.8, 0.4], abs=0.03)
    weights = torch.softmax(w, 0).tolist()
    assert weights[1] == pytest.approx(0.8, abs=0.03)
    assert weights[3] == pytest.approx(0.2, abs=0.03)


def test_minimax_toy_tends_to_the_saddle():
    """f = x w, g = -x w on [-10, 10]^2 from (4, 4): the solution is (0, 0)."""
    w, x = torch.tensor([4.0], dtype=torch.float64), torch.tensor([4.0], dtype=torch.float64)
    bome = Bome(make_space({"w": w}, {"x": x}, 0.05), inner_steps=10, inner_rate=0.05, eta=0.5)
    for _ in range(2000):
        bome.step(lambda: (x * w).sum(), lambda: -(x * w).sum())
        w.detach().clamp_(-10, 10)
        x.detach().clamp_(-10, 10)
    assert abs(w.item()) + abs(x.item()) < 0.2


class TestInvariants:
    @settings(max_examples=60, deadline=None)
    @given(
        v0=st.floats(-5, 5),
        theta0=st.floats(-5, 5),
        inner_steps=st.integers(1, 6),
        eta=st.floats(0.05, 3),
        phi=st.sampled_from(["grad_norm", "residual"]),
    )
    def test_direction_lowers_the_residual_as_asked(self, v0, theta0, inner_steps, eta, phi):
        """<grad q, delta> >= phi, with equality where lambda > 0 (epsilon = 0)."""
        bome, v, theta = quadratic(
            v0, theta0, 0.01, inner_steps=inner_steps, inner_rate=0.1, eta=eta, phi=phi, epsilon=0.0
        )
        before = (v.item(), theta.item())
        delta, state = bome.direction(*bome.problem)
        assert (v.item(), theta.item()) == before
        if state.residual_norm_sq < 1e-12:
            return
        lam_direction = state.inner_product + state.lam * state.residual_norm_sq
        grad_f = bome.space.gradient(bome.problem[0])[1]
        if state.lam > 1e-12:
            grad_q = delta.plus(grad_f, -1.0)
            assert bome.space.inner(grad_q, delta) / state.lam == pytest.approx(state.phi, rel=1e-6, abs=1e-9)
        else:
            assert state.inner_product >= state.phi - 1e-9
            assert bome.space.inner(delta.plus(grad_f, -1.0), delta) == 0.0
        assert lam_direction >= state.phi - 1e-6 * max(1.0, abs(state.phi))

    @given(v0=st.floats(-5, 5))
    def test_residual_vanishes_at_the_lower_optimum(self, v0):
        bome, *_ = quadratic(v0, A * v0, 0.01, inner_steps=3, inner_rate=0.1)
        _, state = bome.direction(*bome.problem)
        assert state.residual == 0.0
        assert state.residual_norm_sq == 0.0

    @given(v0=st.floats(-5, 5), theta0=st.floats(-5, 5))
    def test_without_inner_steps_the_residual_and_its_alpha_gradient_are_zero(self, v0, theta0):
        """q = 0 and grad_v q = 0 at T = 0, so delta_alpha = grad_alpha f = rho (v - d)."""
        bome, *_ = quadratic(v0, theta0, 0.01, inner_steps=0, inner_rate=0.1)
        delta, state = bome.direction(*bome.problem)
        assert state.residual == 0.0
        assert delta.alpha[0].item() == pytest.approx(RHO * (v0 - D), abs=1e-12)

    def test_inner_steps_leave_optimiser_and_theta_untouched(self):
        v, theta = torch.tensor([3.0]), torch.tensor([-2.0 / 3.0])
        space = TorchSpace({"v": v}, {"t": theta}, torch.optim.AdamW(block_groups({"v": v}, {"t": theta}), lr=0.1))
        bome = Bome(space, inner_steps=7, inner_rate=0.1)
        bome.direction(lambda: ((theta - 1) ** 2).sum(), lambda: ((theta - 2 * v) ** 2).sum())
        assert theta.item() == torch.tensor(-2.0 / 3.0).item()
        assert not space.optimizer.state


def test_block_vector_treats_an_absent_block_as_zero():
    x = BlockVector(alpha=(torch.tensor([1.0]),))
    y = BlockVector(theta=(torch.tensor([2.0]),))
    total = x.plus(y, -3.0)
    assert (total.alpha[0].item(), total.theta[0].item()) == (1.0, -6.0)


@pytest.mark.parametrize("bad", [{"inner_steps": -1}, {"inner_rate": 0.0}, {"eta": -1.0}, {"epsilon": -1e-9}])
def test_parameters_out_of_range_are_refused(bad):
    v = torch.zeros(1)
    with pytest.raises(ValueError, match="inner_steps"):
        Bome(make_space({"v": v}, {}, 0.1), **({"inner_steps": 1, "inner_rate": 0.1} | bad))
