"""An adapter folder as an MLflow model: the files that `mlflow models predict` and `serve` need beside it.

The flavour is `python_function` with this module as its loader, so the folder stays an adapter folder, and nothing is
pickled.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import CaltuneError

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.models import ModelSignature

    from components.registry.predictor import Predictor

PINNED = ("caltune", "mlflow", "numpy", "pandas", "peft", "safetensors", "tokenizers", "torch", "transformers")
"""Packages that a model in service is asked to have in the very version it was registered with."""
EXAMPLE = [
    {"id": "1", "question": "What is the capital of France?", "choices": ["Lima", "Paris", "Oslo", "Rome"]},
    {"id": "2", "question": "Which element has the symbol Fe?", "choices": ["iron", "tin"]},
]
POLICY = "policy"
"""The inference parameter that names an abstention policy; empty takes the model's default one."""
COLUMNS = ("id", "answer", "answer_index", "confidence_softmax")


def add_model_files(folder: Path, routed: bool) -> None:
    """Makes an adapter folder an MLflow model: writes `MLmodel`, requirements, signature and an input example into it.

    Args:
        folder: An adapter folder.
        routed: Whether the model states a router confidence, as a column of its own.
    """
    import mlflow.pyfunc
    import pandas as pd

    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch) / "model"
        mlflow.pyfunc.save_model(
            written,
            loader_module=__name__,
            signature=signature(routed),
            input_example=pd.DataFrame(EXAMPLE),
            pip_requirements=[f"{name}=={_public_version(name)}" for name in PINNED],
            model_config={"device": "cpu", "base_model": None},
        )
        shutil.copytree(written, folder, dirs_exist_ok=True)


def signature(routed: bool) -> ModelSignature:
    """What goes in and what comes out.

    Args:
        routed: Whether there is a router confidence.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec
    from mlflow.types.schema import Array

    asked: list[ColSpec | TensorSpec] = [
        ColSpec(DataType.string, "id", required=False),
        ColSpec(DataType.string, "question"),
        ColSpec(Array(DataType.string), "choices", required=False),
    ]
    told: list[ColSpec | TensorSpec] = [
        ColSpec(DataType.string, "id"),
        ColSpec(DataType.string, "answer"),
        ColSpec(DataType.long, "answer_index", required=False),
        ColSpec(DataType.double, "confidence_softmax", required=False),
        *([ColSpec(DataType.double, "confidence_flc")] if routed else []),
        ColSpec(Array(DataType.double), "probabilities", required=False),
        ColSpec(DataType.boolean, "abstained", required=False),
    ]
    return ModelSignature(Schema(asked), Schema(told), ParamSchema([ParamSpec(POLICY, DataType.string, "")]))


class PyfuncModel:
    """What MLflow calls.

    Args:
        predictor: The model.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def predict(self, model_input: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Answers rows `question`, `choices` and, if wanted, `id`; a row a prediction, as `caltune predict` writes it.

        Args:
            model_input: The questions; without choices one is open-ended.
            params: `policy` names an abstention policy.

        Raises:
            MlflowException: A question is malformed or too long (named), or there is no such policy; HTTP status 400.
        """
        import pandas as pd
        from mlflow.exceptions import MlflowException

        try:
            found = self.predictor.predict(list(_rows(model_input)), (params or {}).get(POLICY) or None)
        except CaltuneError as problem:
            raise MlflowException.invalid_parameter_value(str(problem)) from problem
        rows = [prediction.as_row() for prediction in found]
        names = dict.fromkeys([*COLUMNS, *(name for row in rows for name in row)])
        columns = [name for name in names if name not in ("probabilities", "abstained")]
        values = {name: [row.get(name) for row in rows] for name in [*columns, "probabilities", "abstained"]}
        # A column with gaps keeps None, which JSON has; pandas would put NaN, which it has not.
        return pd.DataFrame({name: pd.Series(of, dtype=object if None in of else None) for name, of in values.items()})


def _load_pyfunc(data_path: str, model_config: Mapping[str, Any] | None = None) -> PyfuncModel:
    """MLflow's entry point; `model_config` may hold `device` and `base_model`, as `Predictor` takes them."""
    from components.registry.predictor import Predictor

    return PyfuncModel(Predictor(Path(data_path), **(model_config or {})))


def _rows(table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Rows without their gaps, which pandas holds as None or NaN, and with lists that numpy holds as arrays."""
    import pandas as pd

    for row in table.to_dict(orient="records"):
        plain = {str(name): value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
        yield {name: value for name, value in plain.items() if isinstance(value, list) or not pd.isna(value)}


def _public_version(package: str) -> str:
    """A version without the build of this machine (`+cpu`), which an index may not have."""
    return importlib.metadata.version(package).partition("+")[0]
