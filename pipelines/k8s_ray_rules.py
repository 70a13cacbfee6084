"""KubeRay's rules for RayJob, RayCluster and RayCronJob that no schema states, and ours on top of them.

The operator's rules are those of its `validation.go` (v1.7.0) and of the resource definitions' CEL expressions. It
checks them only after an object has been accepted, and leaves a broken one as `ValidationFailed` for somebody to find.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipelines.k8s_cluster_rules import MANAGERS, cluster_problems

Document = Mapping[str, Any]

LONGEST_NAME = {"RayJob": 47, "RayCluster": 53, "RayCronJob": 36}
"""Characters; what the operator hangs on has to fit into 63."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MOST_GROUPS_IN_A_QUEUE = 7  # a Kueue workload has at most 8 pod sets, the head is one of them
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DELETED_IN_THIS_ORDER = ("DeleteWorkers", "DeleteCluster", "DeleteSelf")


def name_problems(kind: str, name: str) -> list[str]:
    """What is wrong with the name of a Ray object."""
    found = []
    if len(name) > LONGEST_NAME[kind]:
        found.append(f"the name '{name}' has {len(name)} characters; a {kind} may have {LONGEST_NAME[kind]}")
    if not _DNS_1035.fullmatch(name):
        found.append(
            f"the name '{name}' must begin with a lower-case letter, end with a letter or digit and hold only "
            "lower-case letters, digits and hyphens"
        )
    return found


def ray_problems(document: Document) -> list[str]:
    """What is wrong with a RayJob, RayCluster or RayCronJob; empty where all is well."""
    kind, metadata, spec = document["kind"], document.get("metadata") or {}, document.get("spec") or {}
    found = name_problems(kind, str(metadata.get("name", "")))
    if document.get("apiVersion") != "ray.io/v1":
        found.append(f"apiVersion is '{document.get('apiVersion')}', use ray.io/v1")
    queue = QUEUE_LABEL in (metadata.get("labels") or {})
    if kind == "RayCluster":
        found += [f"spec: {problem}" for problem in cluster_problems(spec)]
    elif kind == "RayJob":
        found += [f"spec: {problem}" for problem in _job(spec, queue)]
    else:
        if queue:
            found.append(f"the label {QUEUE_LABEL} does not reach the RayJobs that a RayCronJob creates")
        found += [f"spec.jobTemplate: {problem}" for problem in _job(spec.get("jobTemplate") or {}, False)]
    return found


def _job(spec: Document, queue: bool) -> Iterator[str]:
    selector, cluster = spec.get("clusterSelector"), spec.get("rayClusterSpec")
    if not spec.get("entrypoint") and spec.get("submissionMode") != "InteractiveMode":
        yield "entrypoint is missing"
    if bool(selector) == bool(cluster):
        yield "exactly one of rayClusterSpec and clusterSelector is needed"
    if selector:
        for name in ("backoffLimit", "suspend"):
            if spec.get(name):
                yield f"{name} does not go with clusterSelector"
    yield from _limits(spec)
    yield from _end(spec)
    yield from _modes(spec)
    if spec.get("jobId") and spec.get("backoffLimit"):
        yield "jobId does not go with backoffLimit: the second try would have the id of the first"
    if spec.get("managedBy", MANAGERS[0]) not in MANAGERS:
        yield f"managedBy must be one of {', '.join(MANAGERS)}"
    try:
        environment = YAML(typ="safe").load(spec.get("runtimeEnvYAML") or "{}")
        if not isinstance(environment, dict):
            yield "runtimeEnvYAML is not a mapping"
    except YAMLError as problem:
        yield f"runtimeEnvYAML is not YAML: {problem}"
    if queue and not spec.get("shutdownAfterJobFinishes"):
        yield "Kueue needs shutdownAfterJobFinishes: true"
    if queue and len((cluster or {}).get("workerGroupSpecs") or []) > MOST_GROUPS_IN_A_QUEUE:
        yield f"more than {MOST_GROUPS_IN_A_QUEUE} worker groups do not fit into a Kueue workload"
    if cluster:
        yield from (f"rayClusterSpec: {problem}" for problem in cluster_problems(cluster))


def _limits(spec: Document) -> Iterator[str]:
    """Deadlines and numbers of tries; none may be left to a default (E40, E42, E43)."""
    for name in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if not isinstance(spec.get(name), int) or spec[name] <= 0:
            yield f"{name} must be a positive number of seconds: without it a stuck job stays for ever"
            return
    if spec["preRunningDeadlineSeconds"] >= spec["activeDeadlineSeconds"]:
        yield "preRunningDeadlineSeconds must be less than activeDeadlineSeconds, which counts from the same moment"
    if isinstance(spec.get("backoffLimit"), int) and spec["backoffLimit"] >= 0:
        pass
    elif not spec.get("clusterSelector"):
        yield "backoffLimit must be said, 0 or more: each try builds a new cluster"
    sidecar = spec.get("submissionMode") == "SidecarMode"
    if not sidecar and not isinstance((spec.get("submitterConfig") or {}).get("backoffLimit"), int):
        yield "submitterConfig.backoffLimit must be said: by itself a failed command is submitted again"


def _end(spec: Document) -> Iterator[str]:
    """What becomes of the cluster when the job has ended."""
    shuts_down, lifetime = spec.get("shutdownAfterJobFinishes"), spec.get("ttlSecondsAfterFinished", 0)
    if lifetime < 0:
        yield "ttlSecondsAfterFinished must not be negative"
    if lifetime > 0 and not shuts_down:
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes: true"
    if spec.get("suspend") and not shuts_down:
        yield "suspend needs shutdownAfterJobFinishes: true"
    if "deletionStrategy" in spec:
        yield from (f"deletionStrategy: {problem}" for problem in _deletion(spec))
    elif not shuts_down and not spec.get("clusterSelector"):
        yield "shutdownAfterJobFinishes must be true, or the cluster stays and costs money"


def _deletion(spec: Document) -> Iterator[str]:
    strategy, shuts_down = spec["deletionStrategy"] or {}, spec.get("shutdownAfterJobFinishes")
    old_way = [strategy[name] or {} for name in ("onSuccess", "onFailure") if name in strategy]
    rules = strategy.get("deletionRules") or []
    if bool(old_way) == bool(rules):
        yield "needs either deletionRules or onSuccess and onFailure"
    if len(old_way) == 1:
        yield "onSuccess and onFailure go together"
    if rules and shuts_down:
        yield "deletionRules and shutdownAfterJobFinishes exclude each other"
    policies = [part.get("policy") for part in (*old_way, *rules)]
    if "DeleteNone" in policies and shuts_down:
        yield "DeleteNone and shutdownAfterJobFinishes exclude each other"
    if "DeleteWorkers" in policies and (spec.get("rayClusterSpec") or {}).get("enableInTreeAutoscaling"):
        yield "DeleteWorkers does not go with autoscaling"
    if {"DeleteWorkers", "DeleteCluster"} & set(policies) and spec.get("clusterSelector"):
        yield "the cluster that clusterSelector names is not the job's to delete"
    seconds: dict[str, dict[str, int]] = {}
    for rule in rules:
        condition, policy = rule.get("condition") or {}, str(rule.get("policy"))
        if ("jobStatus" in condition) == ("jobDeploymentStatus" in condition):
            yield "a rule's condition has exactly one of jobStatus and jobDeploymentStatus"
        of_status = seconds.setdefault(str(condition.get("jobStatus") or condition.get("jobDeploymentStatus")), {})
        if policy in of_status:
            yield f"two rules say when {policy} happens"
        of_status[policy] = int(condition.get("ttlSeconds", 0))
    for status, of_status in seconds.items():
        in_order = [of_status[policy] for policy in _DELETED_IN_THIS_ORDER if policy in of_status]
        if min(in_order, default=0) < 0 or in_order != sorted(in_order):
            yield f"for {status}, ttlSeconds must not fall from {' to '.join(_DELETED_IN_THIS_ORDER)}"


def _modes(spec: Document) -> Iterator[str]:
    mode = spec.get("submissionMode", "K8sJobMode")
    if mode == "SidecarMode":
        for name in ("submitterPodTemplate", "submitterConfig", "clusterSelector"):
            if spec.get(name):
                yield f"{name} does not go with SidecarMode"
        head = ((spec.get("rayClusterSpec") or {}).get("headGroupSpec") or {}).get("template") or {}
        if (head.get("spec") or {}).get("restartPolicy", "Never") != "Never":
            yield "SidecarMode needs restartPolicy Never on the head"
    if mode == "InteractiveMode" and spec.get("backoffLimit"):
        yield "backoffLimit does not go with InteractiveMode"
