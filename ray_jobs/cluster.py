"""Connecting to Ray: a cluster where one is named, else this machine."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

from components.config import ResourcesConfig
from components.errors import CaltuneError, UsageError
from ray_jobs.worker import quiet_environment


def connect(dashboard: bool = False) -> None:
    """Starts or joins Ray unless that has been done. `RAY_ADDRESS` names a cluster, as everywhere in Ray.

    Args:
        dashboard: Whether a Ray started here needs its dashboard. Ray Train asks it who is still alive before it gives
            back what the workers of a trial that was stopped have held; without it they would hold it for ever (E1).

    Raises:
        CaltuneError: The cluster named cannot be reached.
    """
    import ray

    if ray.is_initialized():
        return
    # "local": a cluster that happens to run on this machine is joined only where it is named.
    machine: dict[str, Any] = {"address": "local", "include_dashboard": dashboard, "num_cpus": os.cpu_count()}
    # Its one warning says that access to the cluster needs a token, which is as it should be.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    handler = signal.getsignal(signal.SIGTERM)
    # Workers get the environment here, in one place (E27).
    try:
        ray.init(
            log_to_driver=False,
            logging_level=logging.WARNING,
            runtime_env={"env_vars": quiet_environment()},
            **({} if os.environ.get("RAY_ADDRESS") else machine),
        )
    except ConnectionError as problem:
        raise CaltuneError(
            f"{problem}; RAY_ADDRESS names that cluster: is it up, and is the token (RAY_AUTH_MODE) its own?"
        ) from problem
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray has put its own there, which ends the process at once


def cpus_per_worker(resources: ResourcesConfig) -> int:
    """CPU cores of each worker: as the run file says, else divided evenly, at least one.

    A worker needs all of its cores on one node.

    Raises:
        UsageError: The cluster has not the room; waiting would never end (E1, E21).
    """
    least = resources.min_workers or resources.workers
    each, room = _cores_each(resources, resources.workers)
    if room < least:
        raise UsageError(
            f"resources: {least} workers {_size(resources, each)} do not fit, Ray has room for {room}; lower "
            "resources.workers or resources.cpus_per_worker"
        )
    return each


def resources_per_actor(resources: ResourcesConfig, actors: int) -> tuple[int, int]:
    """CPU cores and GPUs of each of some actors that shall run at the same time; see `cpus_per_worker`.

    Returns:
        CPU cores and GPUs of each.

    Raises:
        UsageError: The nodes have not the room; waiting would never end (E1, E21).
    """
    each, room = _cores_each(resources, actors)
    if room < actors:
        raise UsageError(
            f"evaluation: {actors} actors {_size(resources, each)} do not fit, Ray has room for {room}; "
            "lower evaluation.actors or resources.cpus_per_worker"
        )
    return each, int(resources.use_gpu)


def _cores_each(resources: ResourcesConfig, count: int) -> tuple[int, int]:
    """Cores of each of `count` processes, as many as let all of them run, and how many of that size the nodes take."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def room(cores: int) -> int:
        return sum(
            min(int(node.get("CPU", 0)) // cores, int(node.get("GPU", 0)) if resources.use_gpu else count)
            for node in nodes
        )

    most = sum(int(node.get("CPU", 0)) for node in nodes) // count
    each = resources.cpus_per_worker or next((n for n in range(most, 0, -1) if room(n) >= count), 1)
    return each, room(each)


def _size(resources: ResourcesConfig, cores: int) -> str:
    return f"of {cores} CPU cores" + (" and a GPU" if resources.use_gpu else "")
