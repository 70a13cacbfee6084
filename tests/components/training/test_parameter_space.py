"""Parameter groups: routers are a part of theta with a rate of their own."""

from __future__ import annotations

import pytest
import torch

from components.training.parameter_space import BlockVector, TorchSpace, block_groups

THETA = ("mlp.lora_A_gate_proj", "mlp.router.weight", "mlp.lora_B_gate_proj")


def variables(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(2) for name in names}


def test_routers_are_a_group_of_their_own_without_decay():
    alpha, theta = variables("l"), variables(*THETA)
    groups = {group["rate"]: group for group in block_groups(alpha, theta, weight_decay=0.1)}
    held = {rate: [id(p) for p in group["params"]] for rate, group in groups.items()}
    assert held["theta"] == [id(theta[THETA[0]]), id(theta[THETA[2]])]
    assert held["router"] == [id(theta[THETA[1]])]
    assert held["alpha"] == [id(alpha["l"])]
    assert {rate: group["weight_decay"] for rate, group in groups.items()} == {
        "theta": 0.1,
        "router": 0.0,
        "alpha": 0.0,
    }


def test_without_routers_there_is_no_such_group():
    assert [group["rate"] for group in block_groups({}, variables("a.lora_A.weight"))] == ["theta"]


def test_each_group_moves_at_its_rate_and_theta_keeps_its_order():
    theta = variables(*THETA)
    space = TorchSpace({}, theta, torch.optim.SGD(block_groups({}, theta), lr=1.0))
    space.set_learning_rates({"theta": 0.1, "router": 0.5, "alpha": 9.0})
    space.apply(BlockVector(theta=tuple(torch.full((2,), float(i)) for i in (1, 2, 3))))
    found = [float(p[0]) for p in theta.values()]
    assert found == pytest.approx([1 - 0.1, 1 - 1.0, 1 - 0.3])
