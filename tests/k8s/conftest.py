"""Rendered overlays, strict schemas, and a checker that puts schemas and rules together."""

from __future__ import annotations

import copy
import functools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml  # its C loader reads a megabyte ten times faster than ruamel.yaml

from pipelines.k8s_rules import problems

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
CRDS = ROOT.parent / "shared" / "k8s-schemas"
KUBERNETES = "1.33"
OVERLAYS = ("kind", "dev", "gpu-prod")

Documents = list[dict[str, Any]]


def read_yaml(text: str) -> Documents:
    """All documents of a YAML stream."""
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def strict(schema: Any) -> Any:
    """A structural schema as a JSON schema that refuses unknown fields, as `kubectl apply --validate=strict` does.

    The resource definitions do not list the fields of the top-level `metadata`, which is an object without properties
    and so stays open.
    """
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = [key for key in schema if key != "properties" and not key.startswith("x-kubernetes-")]
    made = {key: strict(schema[key]) for key in kept}
    if "properties" in schema:
        made["properties"] = {name: strict(part) for name, part in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if made.pop("nullable", False) and "type" in made:
        made["type"] = [made["type"], "null"]
    return made


@functools.cache
def ray_schema(kind: str) -> Any:
    """Schema of a Ray resource of `ray.io/v1`, as KubeRay publishes it."""
    path = CRDS / f"ray.io_{kind.lower()}s.yaml"
    if not path.is_file():
        pytest.skip(f"KubeRay's resource definitions (its helm chart's crds folder) are not in {CRDS}")
    (definition,) = read_yaml(path.read_text(encoding="utf-8"))
    return next(v for v in definition["spec"]["versions"] if v["name"] == "v1")["schema"]["openAPIV3Schema"]


@functools.cache
def ray_validator(kind: str) -> jsonschema.Draft202012Validator:
    """Validator of a Ray resource that refuses unknown fields."""
    return jsonschema.Draft202012Validator(strict(ray_schema(kind)))


def schema_problems(document: dict[str, Any]) -> list[str]:
    """What the API server would refuse, unknown fields included."""
    who = f"{document.get('kind')} {document['metadata'].get('name')}"
    if str(document.get("apiVersion")).startswith("ray.io/"):
        found = ray_validator(document["kind"]).iter_errors(document)
        return [f"{who}: {error.json_path}: {error.message}" for error in found]
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: pip install -e '.[dev]'"
    )
    try:
        validate.validate(document, KUBERNETES, strict=True)
    except (validate.ValidationError, validate.SchemaNotFoundError) as error:
        return [f"{who}: {error}"]
    return []


def render(folder: Path) -> Documents:
    """What `kubectl kustomize` makes of a folder."""
    beside = Path(sys.executable).parent / "kubectl"
    kubectl = str(beside) if beside.exists() else shutil.which("kubectl")
    kustomize = shutil.which("kustomize")
    if kubectl is None and kustomize is None:
        pytest.skip("neither kubectl nor kustomize is on the PATH; without one the overlays cannot be built")
    command = [kubectl, "kustomize"] if kubectl else [str(kustomize), "build"]
    result = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return read_yaml(result.stdout)


@functools.cache
def _overlay(name: str) -> Documents:
    return render(K8S / ("base" if name == "base" else f"overlays/{name}"))


@pytest.fixture(scope="session")
def overlay() -> Callable[[str], Documents]:
    """The documents of an overlay by its name, or of `base`; a copy that may be changed."""
    return lambda name: copy.deepcopy(_overlay(name))


@pytest.fixture(scope="session")
def rendered() -> Callable[[Path], Documents]:
    """Renders any folder."""
    return render


@pytest.fixture(scope="session")
def all_problems() -> Callable[[Documents], list[str]]:
    """Everything that schemas, and where these find nothing the rules, have against some documents."""

    def check(documents: Documents, digests: bool = False) -> list[str]:
        found = [problem for document in documents for problem in schema_problems(document)]
        return found or problems(documents, digests=digests)

    return check


@pytest.fixture(scope="session")
def pick() -> Callable[[Documents, str, str], dict[str, Any]]:
    """The one document of a kind and name."""

    def find(documents: Documents, kind: str, name: str) -> dict[str, Any]:
        found = [doc for doc in documents if (doc["kind"], doc["metadata"]["name"]) == (kind, name)]
        assert len(found) == 1, f"{len(found)} of {kind} {name}"
        return found[0]

    return find


@pytest.fixture(scope="session")
def lenient_ray_validator() -> Callable[[str], jsonschema.Draft202012Validator]:
    """A resource definition as it is, which lets unknown fields through."""
    return lambda kind: jsonschema.Draft202012Validator(ray_schema(kind))
