"""What every pod of ours keeps to: no root, no writable root file system, bounded resources, secrets by reference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from components.errors import UsageError
from ray_jobs.job_secrets import is_secret, refuse_secrets

Document = Mapping[str, Any]

_TAG = re.compile(r":[\w][\w.-]*$")
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
_NO_SECRET = ("RAY_AUTH_MODE",)
"""Variables whose names only sound like secrets."""
_SECRET_FILE = re.compile(r"_(FILE|PATH)$")


def pod_specs(node: Any, path: str = "") -> Iterator[tuple[str, Document]]:
    """Every pod specification in a document, wherever it stands, with its path.

    A pod specification is what stands under `spec` and has `containers`.
    """
    if isinstance(node, Mapping):
        spec = node.get("spec")
        if isinstance(spec, Mapping) and "containers" in spec:
            yield f"{path}.spec".lstrip("."), spec
        for key, inner in node.items():
            yield from pod_specs(inner, f"{path}.{key}")
    elif isinstance(node, list):
        for index, inner in enumerate(node):
            yield from pod_specs(inner, f"{path}[{index}]")


def containers(spec: Document) -> list[Document]:
    """Init containers and containers of a pod specification."""
    return [*spec.get("initContainers", []), *spec.get("containers", [])]


def pod_problems(document: Document, *, digests: bool = False) -> list[str]:
    """What is wrong with the pods of a document.

    Args:
        document: Any manifest.
        digests: Images have to be named by digest.

    Returns:
        One sentence each, beginning with the path; empty where all is well.
    """
    found = []
    for path, spec in pod_specs(document):
        found += [f"{path}: {problem}" for problem in _pod(spec)]
        for container in containers(spec):
            where = f"{path} container '{container.get('name')}'"
            found += [f"{where}: {problem}" for problem in container_problems(container, digests=digests)]
    return found


def container_problems(container: Document, *, digests: bool) -> list[str]:
    """What is wrong with one container."""
    return [
        *_security(container.get("securityContext") or {}),
        *resource_problems(container.get("resources") or {}),
        *_environment(container.get("env") or []),
        *_image(str(container.get("image") or ""), digests),
    ]


def resource_problems(resources: Document) -> list[str]:
    """Requests and limits that are missing."""
    return [
        f"resources.{kind}.{name} is missing"
        for kind in ("requests", "limits")
        for name in ("cpu", "memory")
        if name not in (resources.get(kind) or {})
    ]


def _pod(spec: Document) -> Iterator[str]:
    context = spec.get("securityContext") or {}
    if context.get("runAsNonRoot") is not True:
        yield "securityContext.runAsNonRoot must be true"
    if (context.get("seccompProfile") or {}).get("type") != "RuntimeDefault":
        yield "securityContext.seccompProfile.type must be RuntimeDefault"
    if context.get("runAsUser") == 0:
        yield "securityContext.runAsUser is root"
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"{name} is not allowed"
    if not spec.get("serviceAccountName"):
        yield "serviceAccountName is missing: the namespace's default account is not ours"
    if "automountServiceAccountToken" not in spec:
        yield "automountServiceAccountToken must be said: false unless the pod calls the API server"
    for volume in spec.get("volumes") or []:
        if "hostPath" in volume:
            yield f"volume '{volume.get('name')}' is a hostPath"


def _security(context: Document) -> Iterator[str]:
    if context.get("allowPrivilegeEscalation") is not False:
        yield "securityContext.allowPrivilegeEscalation must be false"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "securityContext.readOnlyRootFilesystem must be true"
    if (context.get("capabilities") or {}).get("drop") != ["ALL"]:
        yield "securityContext.capabilities.drop must be [ALL]"
    if context.get("privileged"):
        yield "securityContext.privileged is not allowed"


def _environment(variables: list[Document]) -> Iterator[str]:
    for variable in variables:
        name, value = str(variable.get("name")), variable.get("value")
        if value is None:
            continue
        secret = is_secret(name) or name.endswith("PASSWORD")  # PGPASSWORD is one word
        if secret and not _SECRET_FILE.search(name) and name not in _NO_SECRET:
            yield f"env {name} is a secret written out; take it from a Secret (valueFrom.secretKeyRef)"
        try:
            refuse_secrets(f"env {name}", str(value))
        except UsageError as problem:
            yield str(problem)


def _image(image: str, digests: bool) -> Iterator[str]:
    if digests and not DIGEST.search(image):
        yield f"image '{image}' must be named by digest, name@sha256:..."
    elif not DIGEST.search(image) and (not _TAG.search(image) or image.endswith(":latest")):
        yield f"image '{image}' needs a tag other than latest, or a digest"
