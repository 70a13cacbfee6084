"""What must not travel with a job. A job's specification can be read by everyone who sees the cluster's dashboard.

Secrets reach the cluster by reference: as variables of its pods that come from a Kubernetes Secret, or as files there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from components.errors import UsageError

SECRET_WORDS = frozenset(
    {"APIKEY", "AUTH", "CREDENTIAL", "CREDENTIALS", "KEY", "PASS", "PASSPHRASE", "PASSWD", "PASSWORD", "PAT", "PWD"}
    | {"SECRET", "TOKEN"}
)
_SHORTEST_SECRET = 8
_FOLDERS = frozenset({"PWD", "OLDPWD"})  # the shell's words for where one is and was
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PASSWORD_IN_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@")

STOP_GRACE_SECONDS = 60
JOB_ENVIRONMENT = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE_SECONDS)}
"""Set for every job: how long Ray waits after SIGTERM for a last checkpoint before it kills (by itself 3 s)."""
RESERVED = frozenset({"TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_PROGRESS_BARS", "DS_ACCELERATOR", "RAY_ADDRESS"})
"""Set by the job itself for its workers; Ray refuses a variable that both the job and its driver set (E27)."""


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value is a secret, as `HF_TOKEN` or `AWS_SECRET_ACCESS_KEY` does."""
    return name not in _FOLDERS and not SECRET_WORDS.isdisjoint(name.upper().split("_"))


def job_environment(wanted: Sequence[str], here: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a job: those that every job has, and those asked for.

    Args:
        wanted: Each `NAME=VALUE`, or `NAME` for the value it has here.
        here: This process's environment.

    Raises:
        UsageError: A name or a value is a secret, is set by the job itself, is not set here, or is not a name.
    """
    here = os.environ if here is None else here
    found = dict(JOB_ENVIRONMENT)
    for text in wanted:
        name, equals, value = text.partition("=")
        if not _NAME.fullmatch(name):
            raise UsageError(f"--env '{text}': expected NAME or NAME=VALUE")
        if is_secret(name):
            raise UsageError(
                f"--env {name} looks like a secret, and everyone who sees the cluster can read a job's variables; "
                "give it to the cluster instead (a Kubernetes Secret as variable of its pods)"
            )
        if name in RESERVED or name in JOB_ENVIRONMENT:
            raise UsageError(f"--env {name}: the job sets it itself")
        if not equals and name not in here:
            raise UsageError(f"--env {name} is not set here; write {name}=VALUE")
        found[name] = value if equals else here[name]
        refuse_secrets(f"--env {name}", found[name], here)
    return found


def refuse_secrets(what: str, text: str, here: Mapping[str, str] | None = None) -> None:
    """Refuses text with a password in a URL, or with the value of one of this process's secret variables.

    Args:
        what: What the text is, for the message; the secret itself is not repeated.
        text: What would be sent.
        here: This process's environment.

    Raises:
        UsageError: There is a secret in it.
    """
    here = os.environ if here is None else here
    if _PASSWORD_IN_URL.search(text):
        raise UsageError(
            f"{what} has a password in a URL; leave it out and give it to the cluster as a variable of its pods "
            "(for MLflow: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD from a Kubernetes Secret)"
        )
    for name, value in here.items():
        if is_secret(name) and len(value) >= _SHORTEST_SECRET and value in text:
            raise UsageError(f"{what} contains the value of {name}, a secret; the cluster has to get it another way")
