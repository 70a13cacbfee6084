"""The pods of a Ray cluster for one run, as plain dictionaries. `k8s/base/ray` says the same by hand."""

from __future__ import annotations

from typing import Any

DATA, RUN_FOLDER, HOME = "/data", "/etc/caltune", "/home/caltune"
USER = 1000
"""User and group of the images."""
RAY_VERSION = "2.60.0"
MLFLOW_URI = "http://caltune-mlflow:5000"
ROLE = "caltune.io/role"
"""Label by which the network policies tell pods apart."""
GPU = "nvidia.com/gpu"

SECURITY: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
POD_SECURITY: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
ENVIRONMENT = {
    "MLFLOW_TRACKING_URI": MLFLOW_URI,
    "CALTUNE_CACHE": f"{DATA}/cache/caltune",
    "HF_HOME": f"{DATA}/cache/huggingface",
    "RAY_USAGE_STATS_ENABLED": "0",
}
SECRETS = ("caltune-hub",)
"""Secrets whose keys become variables of Ray's pods, where they exist: HF_TOKEN, for gated models."""


def head_template(image: str, cpus: int, memory: str, config_map: str) -> dict[str, Any]:
    """The head: the command itself runs there, training does not.

    Args:
        image: Trainer image.
        cpus: CPU cores.
        memory: A Kubernetes quantity.
        config_map: Holds the run file.
    """
    template = _template("ray-head", image, {"cpu": str(cpus), "memory": memory}, "caltune-ray-head")
    spec = template["spec"]
    spec["automountServiceAccountToken"] = True  # the autoscaler, where there is one, asks for pods
    container = spec["containers"][0]
    container["ports"] = [
        {"containerPort": 6379, "name": "gcs-server"},
        {"containerPort": 8265, "name": "dashboard"},
        {"containerPort": 10001, "name": "client"},
    ]
    container["volumeMounts"].append({"name": "run", "mountPath": RUN_FOLDER, "readOnly": True})
    spec["volumes"].append({"name": "run", "configMap": {"name": config_map}})
    return template


def worker_template(image: str, cpus: int, memory: str, gpus: int) -> dict[str, Any]:
    """A worker: one process of the training, or one actor of the evaluation.

    Args:
        image: Trainer image.
        cpus: CPU cores.
        memory: A Kubernetes quantity.
        gpus: 0 or 1.
    """
    resources = {"cpu": str(cpus), "memory": memory} | ({GPU: str(gpus)} if gpus else {})
    template = _template("ray-worker", image, resources, "caltune-ray-worker")
    if gpus:
        template["spec"]["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    return template


def submitter_template(image: str) -> dict[str, Any]:
    """The pod that hands the command to the cluster and follows its log."""
    resources = {"requests": {"cpu": "200m", "memory": "512Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    return {
        "metadata": {"labels": {ROLE: "submitter"}},
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": "caltune-ray-worker",
            "automountServiceAccountToken": False,
            "securityContext": dict(POD_SECURITY),
            "containers": [
                {
                    "name": "ray-job-submitter",
                    "image": image,
                    "resources": resources,
                    "securityContext": dict(SECURITY),
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "home", "mountPath": HOME}],
                }
            ],
            "volumes": [_scratch("tmp", "1Gi"), _scratch("home", "1Gi")],
        },
    }


def autoscaling() -> dict[str, Any]:
    """The part of a cluster's specification that lets it grow and shrink between its groups' limits."""
    resources = {"requests": {"cpu": "200m", "memory": "512Mi"}, "limits": {"cpu": "500m", "memory": "512Mi"}}
    return {
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": 300,
            "resources": resources,
            "securityContext": dict(SECURITY),
        },
    }


def _template(name: str, image: str, resources: dict[str, str], account: str) -> dict[str, Any]:
    return {
        "metadata": {"labels": {ROLE: "ray"}},
        "spec": {
            "restartPolicy": "Never",
            "serviceAccountName": account,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 120,  # time for a last checkpoint
            "securityContext": dict(POD_SECURITY),
            "containers": [
                {
                    "name": name,
                    "image": image,
                    "env": [{"name": key, "value": value} for key, value in ENVIRONMENT.items()],
                    "envFrom": [{"secretRef": {"name": secret, "optional": True}} for secret in SECRETS],
                    "resources": {"requests": dict(resources), "limits": dict(resources)},
                    "securityContext": dict(SECURITY),
                    "volumeMounts": [
                        {"name": "data", "mountPath": DATA},
                        {"name": "tmp", "mountPath": "/tmp"},
                        {"name": "home", "mountPath": HOME},
                    ],
                }
            ],
            "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": "caltune-data"}},
                _scratch("tmp", "20Gi"),
                _scratch("home", "5Gi"),
            ],
        },
    }


def _scratch(name: str, limit: str) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"sizeLimit": limit}}
