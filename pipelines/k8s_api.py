"""The few calls to the Kubernetes API server that starting a RayJob needs, from inside a pod."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.errors import JobError, UsageError
from ray_jobs.job_states import FAILED

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_SECONDS = 30.0


class ApiSilentError(Exception):
    """The API server does not answer, or not now; asking again may help."""


@dataclass(frozen=True)
class RayJobs:
    """The RayJobs of one namespace.

    Attributes:
        address: The API server's, e.g. `https://10.0.0.1:443`.
        namespace: Namespace.
        account: Folder with `token` and `ca.crt` of a service account; the token is read anew for each request,
            because it changes.
    """

    address: str
    namespace: str
    account: Path = ACCOUNT

    @classmethod
    def here(cls) -> RayJobs:
        """Those of the namespace that this pod runs in.

        Raises:
            UsageError: This is no pod, or its service account's token is not mounted.
        """
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        namespace = ACCOUNT / "namespace"
        if host is None or not namespace.is_file():
            raise UsageError("this works in a pod only, with automountServiceAccountToken: true")
        shown = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown}:{port}", namespace.read_text(encoding="utf-8").strip())

    def get(self, name: str) -> dict[str, Any]:
        """One RayJob."""
        return self._ask("GET", f"/{urllib.parse.quote(name)}")

    def with_label(self, label: str, value: str) -> list[dict[str, Any]]:
        """All RayJobs that have a label."""
        query = urllib.parse.urlencode({"labelSelector": f"{label}={value}"})
        return list(self._ask("GET", f"?{query}")["items"])

    def create(self, job: dict[str, Any]) -> dict[str, Any]:
        """Creates a RayJob; fields that the API server does not know are refused, not dropped."""
        return self._ask("POST", "?fieldValidation=Strict", job)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.address}/apis/ray.io/v1/namespaces/{self.namespace}/rayjobs{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {(self.account / 'token').read_text(encoding='utf-8').strip()}",
                "Content-Type": "application/json",
                "Accept": "application/json",
            },
        )
        secure = self.address.startswith("https:")
        context = ssl.create_default_context(cafile=str(self.account / "ca.crt")) if secure else None
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=context) as answer:
                content: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as refusal:
            if refusal.code == 429 or refusal.code >= 500:
                raise ApiSilentError(f"the API server answers {refusal.code}") from None
            raise JobError(f"the API server refuses: {_message(refusal)}", FAILED) from None
        except (OSError, ValueError) as problem:
            raise ApiSilentError(str(problem)) from None
        return content


def _message(refusal: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(refusal)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{refusal.code} {refusal.reason}"
