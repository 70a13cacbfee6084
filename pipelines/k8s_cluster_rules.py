"""KubeRay's rules for a cluster's specification that no schema states, and ours on top of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Document = Mapping[str, Any]

MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
_OLDEST_RAY_WITH_TOKENS = (2, 52)
_RAY_START_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")


def cluster_problems(spec: Document) -> Iterator[str]:
    """What is wrong with a cluster's specification, in a RayCluster or in a RayJob."""
    head, groups = spec.get("headGroupSpec") or {}, spec.get("workerGroupSpecs") or []
    yield from _authentication(spec)
    if spec.get("managedBy", MANAGERS[0]) not in MANAGERS:
        yield f"managedBy must be one of {', '.join(MANAGERS)}"
    names = [group.get("groupName") for group in groups]
    if len(set(names)) != len(names):
        yield "two worker groups have the same name"
    for name, group in [("headGroupSpec", head), *zip(names, groups, strict=True)]:
        start = group.get("rayStartParams") or {}
        if not ((group.get("template") or {}).get("spec") or {}).get("containers"):
            yield f"{name}: has no container"
        if group.get("resources") and any(key in start for key in _RAY_START_RESOURCES):
            yield f"{name}: resources stand in rayStartParams and in resources; use one"
        if "labels" in start:
            yield f"{name}: labels are not taken from rayStartParams; use labels"
    for group in groups:
        yield from (f"{group.get('groupName')}: {problem}" for problem in _size(group))
    if spec.get("enableInTreeAutoscaling"):
        yield from _autoscaling(spec, [head, *groups])
    yield from _redis(spec, head)


def _authentication(spec: Document) -> Iterator[str]:
    options = spec.get("authOptions") or {}
    if options.get("mode") != "token":
        yield "authOptions.mode must be token: without it whoever reaches the dashboard runs what they like"
        return
    version = str(spec.get("rayVersion") or "")
    parts = re.match(r"(\d+)\.(\d+)\.\d+", version)
    if parts is None:
        yield f"authOptions.mode token needs rayVersion, not '{version}'"
    elif tuple(map(int, parts.groups())) < _OLDEST_RAY_WITH_TOKENS:
        yield f"authOptions.mode token needs Ray 2.52.0 or newer, rayVersion is {version}"


def _size(group: Document) -> Iterator[str]:
    low, high = group.get("minReplicas"), group.get("maxReplicas")
    if low is None or high is None:
        yield "minReplicas and maxReplicas are needed"
        return
    if not 0 <= low <= group.get("replicas", low) <= high:
        yield f"replicas {group.get('replicas')} must lie between minReplicas {low} and maxReplicas {high}"


def _autoscaling(spec: Document, groups: list[Document]) -> Iterator[str]:
    options = spec.get("autoscalerOptions") or {}
    if options.get("version") != "v2":
        yield "autoscalerOptions.version must be v2"
    for name in ("requests", "limits"):
        if not ((options.get("resources") or {}).get(name) or {}).get("memory"):
            yield f"autoscalerOptions.resources.{name} is missing"
    context = options.get("securityContext") or {}
    if context.get("readOnlyRootFilesystem") is not True or context.get("allowPrivilegeEscalation") is not False:
        yield "autoscalerOptions.securityContext needs readOnlyRootFilesystem and no allowPrivilegeEscalation"
    for group in groups:
        name, pod = group.get("groupName", "headGroupSpec"), (group.get("template") or {}).get("spec") or {}
        if pod.get("restartPolicy", "Never") != "Never":
            yield f"{name}: the autoscaler v2 needs restartPolicy Never"
        if group.get("suspend"):
            yield f"{name}: a group cannot be suspended with autoscaling"
    if "RAY_enable_autoscaler_v2" in _variables(groups[0]):
        yield "RAY_enable_autoscaler_v2 and autoscalerOptions.version are both set"


def _redis(spec: Document, head: Document) -> Iterator[str]:
    """An address or password of Redis may stand in `gcsFaultToleranceOptions` only."""
    for name in sorted({"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"} & _variables(head)):
        yield f"{name} belongs into gcsFaultToleranceOptions, not into the head's environment"
    for name in ("redis-password", "redis-username"):
        if name in (head.get("rayStartParams") or {}):
            yield f"{name} belongs into gcsFaultToleranceOptions, not into rayStartParams"


def _variables(group: Document) -> set[str]:
    """Names of the variables of a group's Ray container, which is the first."""
    pod = (group.get("template") or {}).get("spec") or {}
    first = (pod.get("containers") or [{}])[0]
    return {str(variable.get("name")) for variable in first.get("env") or []}
