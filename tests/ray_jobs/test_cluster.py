"""Room on a cluster of several nodes, asked for in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASK = """
from components.config import ResourcesConfig
from components.errors import UsageError
from ray_jobs.cluster import connect, cpus_per_worker
connect()
print(cpus_per_worker(ResourcesConfig(workers=1)), cpus_per_worker(ResourcesConfig(workers=2)))
try:
    cpus_per_worker(ResourcesConfig(workers=1, cpus_per_worker=3))
except UsageError as problem:
    print(problem)
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_worker_is_not_given_more_cores_than_a_node_has():
    """Two nodes of two cores are four, but a worker of four, or of three, would wait for ever."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        command = [sys.executable, "-c", ASK]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    finally:
        cluster.shutdown()
    cores, problem = result.stdout.strip().splitlines()
    assert cores == "2 2"
    assert "1 workers of 3 CPU cores do not fit, Ray has room for 0" in problem
