"""`caltune doctor`: what this machine has, which settings win, what stands in the way."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from components.config import RunConfig
from components.errors import CaltuneError

PACKAGES = ("torch", "transformers", "peft", "deepspeed", "ray", "mlflow", "datasets")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        what: What was looked at.
        found: What was found, and what to do where it is not right.
        ok: Whether it stands in no one's way.
    """

    what: str
    found: str
    ok: bool = True


def examine(config: Path | None) -> list[Finding]:
    """Looks at everything a run needs. Starts nothing and changes nothing.

    Args:
        config: A run file to check against this machine.
    """
    findings = [_python(), *_packages(), _processors(), _memory(), _compiler(), _ray(), _hub(), _model_cache()]
    return findings + (_run_file(config) if config is not None else [])


def _python() -> Finding:
    return Finding("python", sys.version.split()[0], sys.version_info >= (3, 11))


def _packages() -> list[Finding]:
    found = []
    for name in PACKAGES:
        try:
            found.append(Finding(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(name, "not installed; run make run or pip install -c constraints.txt -e .", False))
    return found


def _processors() -> Finding:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("processors", f"{os.cpu_count()} CPU cores, {len(gpus)} GPUs {', '.join(gpus)}".rstrip())


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available / 2**30
    disk = shutil.disk_usage(Path.cwd()).free / 2**30
    return Finding("memory and disk", f"{free:.1f} GiB and {disk:.1f} GiB free", free > 2 and disk > 2)


def _compiler() -> Finding:
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None and not _beside_python(tool)]
    if missing:
        return Finding("compiler", f"no {', '.join(missing)}: DeepSpeed cannot build operators it may need", False)
    return Finding("compiler", "g++ and ninja")


def _beside_python(tool: str) -> bool:
    return (Path(sys.executable).parent / tool).exists()


def _ray() -> Finding:
    address = os.environ.get("RAY_ADDRESS")
    return Finding("Ray", f"cluster at {address} (RAY_ADDRESS)" if address else "this machine; RAY_ADDRESS is not set")


def _hub() -> Finding:
    offline = os.environ.get("HF_HUB_OFFLINE") == "1"
    return Finding(
        "model hub", "not asked (HF_HUB_OFFLINE=1)" if offline else "asked when a model or data set needs it"
    )


def _model_cache() -> Finding:
    from components.models.smollm2 import NAME, cache_folder

    folder = cache_folder() / NAME
    there = (folder / "config.json").exists()
    return Finding("smollm2-135m-instruct", f"{folder}" if there else "not in the cache yet; the first run fetches it")


def _run_file(path: Path) -> list[Finding]:
    from components.run_file import load_run_file

    try:
        config = load_run_file(path)
    except CaltuneError as problem:
        return [Finding("run file", str(problem), False)]
    findings = [Finding("run file", f"{path} is valid"), _tracking(config), _resources(config)]
    return [*findings, _search(config)] if config.tune is not None else findings


def _tracking(config: RunConfig) -> Finding:
    from components.tracking.mlflow_logger import resolve_tracking

    if not config.tracking.enabled:
        return Finding("tracking", "off (tracking.enabled)")
    try:
        uri, experiment, source = resolve_tracking(config, config.output_dir)
    except CaltuneError as problem:
        return Finding("tracking", str(problem), False)
    return Finding("tracking", f"{uri}, experiment '{experiment}' (from {source})")


def _resources(config: RunConfig) -> Finding:
    wanted, cores = config.resources, os.cpu_count() or 1
    need = wanted.workers * (wanted.cpus_per_worker or 1)
    text = f"{wanted.workers} workers, {need} CPU cores at least"
    if os.environ.get("RAY_ADDRESS"):
        return Finding("resources", f"{text}; checked against the cluster when the run starts")
    return Finding("resources", f"{text}; this machine has {cores}", need <= cores)


def _search(config: RunConfig) -> Finding:
    """How many trials of the run file's search fit at once."""
    from ray_jobs.tune import room_for

    assert config.tune is not None
    try:
        return Finding("search", room_for(config.tune, config.resources, _nodes()).sentence)
    except CaltuneError as problem:
        return Finding("search", str(problem), False)


def _nodes() -> list[dict[str, float]]:
    """Resources of each node of the cluster that RAY_ADDRESS names, or of this machine.

    Raises:
        CaltuneError: The cluster does not answer.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        import torch

        return [{"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}]
    from ray.util.state import list_nodes

    try:
        nodes = list_nodes(address, filters=[("state", "=", "ALIVE")], timeout=10, detail=True)
    except Exception as problem:  # of many kinds, from requests, grpc and Ray
        raise CaltuneError(f"the cluster at {address} (RAY_ADDRESS) cannot be asked: {problem}") from problem
    return [dict(node.resources_total) for node in nodes]
