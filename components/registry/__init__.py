"""Using what was trained: `load` gives a predictor; the modules beside it are the registry of versions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.registry.predictor import Predictor


def load(path_or_model_uri: str | Path, **options: Any) -> Predictor:
    """A predictor from an adapter folder or an MLflow URI; options and errors as of `predictor.load_predictor`."""
    from components.registry.predictor import load_predictor

    return load_predictor(path_or_model_uri, **options)
