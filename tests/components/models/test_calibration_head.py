"""The calibration head: identity at start, the formula, its bounds, and strict files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.errors import ModelError
from components.models.calibration_head import FILE_NAME, CalibrationHead

DESCRIPTION = {"version": 1, "form": "vocabulary", "vocabulary_size": 3, "max_temperature": 8.0}


def described(change: dict[str, object]) -> dict[str, str]:
    return {"caltune": json.dumps(DESCRIPTION | change)}


def random_head(size: int = 3) -> CalibrationHead:
    head = CalibrationHead(size)
    with torch.no_grad():
        head.l.normal_()
        head.rho.normal_()
        head.shared.normal_()
    return head


@pytest.mark.parametrize("form", ["vocabulary", "scalar"])
def test_fresh_head_is_exactly_the_identity(form: str) -> None:
    logits = torch.randn(2, 5, 11) * 30
    assert torch.equal(CalibrationHead(11, form)(logits), logits)


def test_known_values() -> None:
    """z = (2, 4), tau = (2, 1/2), l = (1, -1): 2 / 2 + 1 = 2 and 4 / (1/2) - 1 = 7.

    tau is made of a shared 4 and of 1/2 and 1/8 for the tokens.
    """
    head = CalibrationHead(2)
    with torch.no_grad():
        head.rho.copy_(torch.tensor([0.5, 0.125]).log())
        head.shared.copy_(torch.tensor([4.0]).log())
        head.l.copy_(torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(head(torch.tensor([2.0, 4.0])), torch.tensor([2.0, 7.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_precision_are_adjusted_in_float32(dtype: torch.dtype) -> None:
    adjusted = random_head()(torch.randn(4, 3, dtype=dtype))
    assert adjusted.dtype == torch.float32


def test_gradients() -> None:
    """Of the sum of z / exp(rho) + l over 4 rows: 4 for each l, -sum(z) / tau for each rho, 1 / tau for each z."""
    head = random_head()
    logits = torch.randn(4, 3, requires_grad=True)
    head(logits).sum().backward()
    tau = (head.rho + head.shared).detach().exp()
    torch.testing.assert_close(head.shared.grad, (-logits.detach() / tau).sum().reshape(1))
    torch.testing.assert_close(head.l.grad, torch.full((3,), 4.0))
    torch.testing.assert_close(head.rho.grad, -logits.detach().sum(0) / tau)
    torch.testing.assert_close(logits.grad, (1 / tau).expand(4, 3))


def test_scalar_form_trains_its_temperature_alone() -> None:
    head = CalibrationHead(5, "scalar")
    assert [name for name, value in head.named_parameters() if value.requires_grad] == ["shared"]
    assert head.rho.shape == head.l.shape == (1,)
    loss = -torch.log_softmax(head(torch.randn(2, 5)), -1)[:, 0].mean()
    loss.backward()
    assert head.shared.grad is not None
    assert head.l.grad is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=3, max_size=3), st.floats(-5, 5), st.floats(1.01, 20))
def test_clamp_projects_into_the_bounds_and_is_idempotent(rho: list[float], shared: float, bound: float) -> None:
    head = CalibrationHead(3, max_temperature=bound)
    with torch.no_grad():
        head.rho.copy_(torch.tensor(rho))
        head.shared.fill_(shared)
    head.clamp_()
    tau = (head.rho + head.shared).detach().exp()
    assert (tau <= bound * (1 + 1e-5)).all()
    assert (tau >= (1 - 1e-5) / bound).all()
    once = head.rho.detach().clone()
    head.clamp_()
    assert torch.equal(head.rho, once)
    inside = (torch.tensor(rho) + head.shared.detach()).abs() < torch.tensor(bound).log() * 0.999
    assert torch.equal(once[inside], torch.tensor(rho)[inside])


def test_summary() -> None:
    """tau = (1, 4), l = (3, 4): mean 2.5, norm 5."""
    head = CalibrationHead(2)
    with torch.no_grad():
        head.rho.copy_(torch.tensor([1.0, 4.0]).log())
        head.l.copy_(torch.tensor([3.0, 4.0]))
    assert head.summary() == pytest.approx({"mean_tau": 2.5, "offset_norm": 5.0}, rel=1e-6)


def test_logits_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="4 columns, the head 3"):
        CalibrationHead(3)(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="4 columns, the head 3"):
        CalibrationHead(3, "scalar")(torch.zeros(2, 4))


@pytest.mark.parametrize("form", ["vocabulary", "scalar"])
def test_a_saved_head_reads_back_bit_for_bit(tmp_path: Path, form: str) -> None:
    head = CalibrationHead(3, form, max_temperature=3.7)
    with torch.no_grad():
        head.rho.normal_()
    head.save(tmp_path)
    again = CalibrationHead.load(tmp_path)
    assert (again.form, again.vocabulary_size, again.max_temperature) == (form, 3, 3.7)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))
    assert [p.requires_grad for p in head.parameters()] == [p.requires_grad for p in again.parameters()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared": None}, "missing key 'shared'"),
        ({"rho": None}, "missing key 'rho'"),
        ({"tau": torch.ones(3)}, "unexpected key 'tau'"),
        ({"l": torch.zeros(2)}, r"key 'l' is torch.float32 \[2\], expected torch.float32 \[3\]"),
        ({"l": torch.zeros(3, dtype=torch.float16)}, "key 'l' is torch.float16"),
        ({"rho": torch.tensor([0.0, float("nan"), 0.0])}, "key 'rho' has values that are not finite"),
    ],
)
def test_wrong_tensors_are_refused_by_name(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    tensors = {"l": torch.zeros(3), "rho": torch.zeros(3), "shared": torch.zeros(1)} | change
    save_file({key: value for key, value in tensors.items() if value is not None}, tmp_path / FILE_NAME, described({}))
    with pytest.raises(ModelError, match=message):
        CalibrationHead.load(tmp_path)


@pytest.mark.parametrize("change", [{"version": 2}, {"form": "matrix"}, {"vocabulary_size": "many"}])
def test_wrong_descriptions_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    save_file({"l": torch.zeros(3), "rho": torch.zeros(3)}, tmp_path / FILE_NAME, described(change))
    with pytest.raises(ModelError, match=r"file version 2|description is not valid"):
        CalibrationHead.load(tmp_path)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        CalibrationHead.load(tmp_path)
    path = random_head().save(tmp_path)
    assert set(load_file(path)) == {"l", "rho", "shared"}
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match="cannot be read"):
        CalibrationHead.load(tmp_path)
