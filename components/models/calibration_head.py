"""CALM's alpha = (l, tau): an additive offset and a temperature per token of the vocabulary, put on top of the logits.

The adjusted logits are z_y / tau_y + l_y with tau_y = exp(rho_y + shared). The paper names the two vectors
("temperature", "additive"); the exact form is our reading, supported by its ancestors AutoBalance (arXiv 2201.01212)
and VS loss (arXiv 2103.01550). The identity is the start: rho = 0, shared = 0, l = 0.

`shared` adds nothing to what the head can express, only to how it is reached: it is the direction in which all
temperatures move together, so that tokens which training never scores get a temperature too (ours).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from components.errors import ModelError

FILE_NAME = "calibration_head.safetensors"
FILE_VERSION = 1
METADATA_KEY = "caltune"

HeadForm = Literal["vocabulary", "scalar"]


class CalibrationHead(nn.Module):
    """Offsets l and temperatures tau = exp(rho) on logits.

    Attributes:
        l: Offsets, [K], or [1] for the scalar form. A scalar offset adds the same to every logit, which softmax does
            not see; it therefore stays 0 and is not trained.
        rho: Logarithms of the temperatures, less `shared`, [K]; a constant 0, [1], for the scalar form.
        shared: The part of the logarithms that all temperatures have in common, [1].
        form: `vocabulary` or `scalar`.
        vocabulary_size: K, the number of logits a row has.
        max_temperature: `clamp_` keeps tau in [1 / max_temperature, max_temperature].
    """

    def __init__(self, vocabulary_size: int, form: HeadForm = "vocabulary", max_temperature: float = 8.0) -> None:
        """Makes an identity head.

        Args:
            vocabulary_size: K, at least 1; the width of the model's logits, which may exceed the tokenizer's size.
            form: One offset and temperature per token, or one temperature for all (the paper's scalar ablation).
            max_temperature: Above 1.
        """
        super().__init__()
        if vocabulary_size < 1 or max_temperature <= 1 or form not in ("vocabulary", "scalar"):
            raise ValueError(f"no such head: {vocabulary_size=}, {form=}, {max_temperature=}")
        self.form: HeadForm = form
        self.vocabulary_size = vocabulary_size
        self.max_temperature = max_temperature
        size = vocabulary_size if form == "vocabulary" else 1
        per_token = form == "vocabulary"
        self.l = nn.Parameter(torch.zeros(size, dtype=torch.float32), requires_grad=per_token)
        self.rho = nn.Parameter(torch.zeros(size, dtype=torch.float32), requires_grad=per_token)
        self.shared = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, logits: Tensor) -> Tensor:
        """Adjusts logits, in float32 whatever their precision.

        Args:
            logits: [..., K], raw, over the whole vocabulary.

        Returns:
            [..., K], z_y / tau_y + l_y; exactly the input while the head is the identity.
        """
        if logits.shape[-1] != self.vocabulary_size:
            raise ValueError(f"logits have {logits.shape[-1]} columns, the head {self.vocabulary_size}")
        return torch.addcmul(self.l, logits.float(), torch.exp(-(self.rho + self.shared)))

    @torch.no_grad()
    def clamp_(self) -> None:
        """Projects tau into [1 / max_temperature, max_temperature], to be called after each step."""
        bound = math.log(self.max_temperature)
        self.shared.clamp_(-bound, bound)
        self.rho.clamp_(min=-bound - self.shared, max=bound - self.shared)

    @torch.no_grad()
    def summary(self) -> dict[str, float]:
        """Mean temperature and Euclidean norm of the offsets, for the trace."""
        tau = torch.exp(self.rho + self.shared)
        return {"mean_tau": float(tau.mean()), "offset_norm": float(self.l.norm())}

    def save(self, folder: Path) -> Path:
        """Writes `calibration_head.safetensors` into a folder and returns its path."""
        path = folder / FILE_NAME
        # One entry, since safetensors writes several in an order that differs from run to run.
        description = json.dumps(
            {
                "version": FILE_VERSION,
                "form": self.form,
                "vocabulary_size": self.vocabulary_size,
                "max_temperature": self.max_temperature,
            }
        )
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()},
            path,
            metadata={METADATA_KEY: description},
        )
        return path

    @classmethod
    def load(cls, folder: Path) -> CalibrationHead:
        """Reads a head back, strictly.

        Args:
            folder: Holds `calibration_head.safetensors`.

        Returns:
            The head, on the CPU.

        Raises:
            ModelError: The file is missing or damaged, of another version, or holds a key, shape, type or value that
                a head cannot have.
        """
        path = folder / FILE_NAME
        try:
            with safe_open(path, framework="pt") as file:
                description = (file.metadata() or {}).get(METADATA_KEY, "{}")
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as problem:
            raise ModelError(f"{path}: the calibration head cannot be read: {problem}") from problem
        head = _from_description(path, description)
        for name, expected in head.state_dict().items():
            _check_tensor(path, name, tensors.get(name), expected)
        unexpected = sorted(tensors.keys() - head.state_dict().keys())
        if unexpected:
            raise ModelError(f"{path}: unexpected key '{unexpected[0]}'")
        head.load_state_dict(tensors)
        return head


def _from_description(path: Path, description: str) -> CalibrationHead:
    try:
        stated = json.loads(description)
        version = stated.get("version")
        if version != FILE_VERSION:
            raise ModelError(f"{path}: file version {version!r}, but {FILE_VERSION!r} is known")
        return CalibrationHead(int(stated["vocabulary_size"]), stated["form"], float(stated["max_temperature"]))
    except (KeyError, ValueError, TypeError, AttributeError) as problem:
        raise ModelError(f"{path}: the head's description is not valid: {problem!r}") from problem


def _check_tensor(path: Path, name: str, found: Tensor | None, expected: Tensor) -> None:
    if found is None:
        raise ModelError(f"{path}: missing key '{name}'")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise ModelError(
            f"{path}: key '{name}' is {found.dtype} {list(found.shape)}, "
            f"expected {expected.dtype} {list(expected.shape)}"
        )
    if not torch.isfinite(found).all():
        raise ModelError(f"{path}: key '{name}' has values that are not finite")
