"""UQ4CT's calibration loss: the routers' confidence against what came out."""

from __future__ import annotations

from torch import Tensor


def calibration_loss_sum(flc: Tensor, correct: Tensor) -> Tensor:
    """Sum over rows of (correct - FLC)^2 (UQ4CT, arXiv 2410.06431); lowest where FLC is the probability to be right.

    A sum, not a mean: the caller divides by the rows of the global batch once.

    Args:
        flc: Functional-level confidence, float [R], in [k / N, 1]; gradient flows to it.
        correct: 1 where the model's answer is right, 0 where it is wrong, or a degree between; [R], taken as constant.

    Returns:
        Scalar, between 0 and R.
    """
    return (correct.detach() - flc).square().sum()
