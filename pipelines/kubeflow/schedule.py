"""Schedules on a Kubeflow Pipelines server: one for each name, pinned to a pipeline version named after its text.

The server has neither an update of a schedule nor a rule against two of the same name, so a schedule is looked up by
name first, left alone where it is what was asked for, and else replaced. Missed times are not made up for, and a run
that is still going on keeps the next one from starting.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

from components.errors import CaltuneError, UsageError
from pipelines.kubeflow.cron import six_fields

if TYPE_CHECKING:
    from kfp import Client

EXPERIMENT = "caltune"
PAGE = 100


@dataclass(frozen=True)
class Asked:
    """A schedule as it shall be.

    Attributes:
        name: Its name.
        cron: Five fields, UTC.
        pipeline: Name of the pipeline.
        package: The compiled pipeline.
        service_account: Kubernetes account of the steps; None is the server's default.
    """

    name: str
    cron: str
    pipeline: str
    package: Path
    service_account: str | None


@dataclass(frozen=True)
class Made:
    """What became of a request for a schedule.

    Attributes:
        id: The schedule's id.
        version: Name of the pipeline version that it is pinned to.
        did: `created`, `replaced` or `unchanged`.
    """

    id: str
    version: str
    did: str


@contextlib.contextmanager
def server(host: str, namespace: str | None) -> Iterator[Client]:
    """A client; what goes wrong becomes a sentence, and what it prints goes to stderr.

    Args:
        host: Address of the server's API.
        namespace: The user's namespace, where the server has several users.

    Raises:
        CaltuneError: The server cannot be reached, or refuses.
    """
    from kfp import Client
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield Client(host=host, namespace=namespace or "kubeflow")  # the client's own default
        except ApiException as refusal:
            raise CaltuneError(f"{host} refuses: {refusal.status} {_message(refusal)}") from refusal
        except HTTPError as problem:
            raise CaltuneError(f"{host} cannot be reached: {problem}") from problem


def schedule(client: Client, asked: Asked, namespace: str | None) -> Made:
    """Makes a schedule be as asked for.

    A schedule that has to go is disabled, then replaced, then deleted, so that there are never two at work and none is
    lost when something fails.

    Args:
        client: The server.
        asked: What is asked for.
        namespace: The user's namespace, where the server has several users.
    """
    cron, version = six_fields(asked.cron), version_name(asked.package.read_bytes())
    pipeline_id, version_id = pinned_version(client, asked.pipeline, asked.package, version)
    old = find(client, asked.name, namespace)
    if old is not None and is_same(old, cron, version_id, asked.service_account):
        return Made(old.recurring_run_id, version, "unchanged")
    experiment = client.create_experiment(EXPERIMENT, namespace=namespace)
    if old is not None:
        client.disable_recurring_run(old.recurring_run_id)
    try:
        made = client.create_recurring_run(
            experiment_id=experiment.experiment_id,
            job_name=asked.name,
            cron_expression=cron,
            max_concurrency=1,
            no_catchup=True,
            pipeline_id=pipeline_id,
            version_id=version_id,
            service_account=asked.service_account,
        )
    except BaseException:
        if old is not None:
            client.enable_recurring_run(old.recurring_run_id)
        raise
    if old is not None:
        client.delete_recurring_run(old.recurring_run_id)
    return Made(made.recurring_run_id, version, "created" if old is None else "replaced")


def unschedule(client: Client, name: str, namespace: str | None) -> str:
    """Deletes a schedule; its pipeline and its past runs stay.

    Returns:
        The id it had.

    Raises:
        UsageError: There is none of that name.
    """
    found = existing(client, name, namespace)
    client.delete_recurring_run(found.recurring_run_id)
    return str(found.recurring_run_id)


def existing(client: Client, name: str, namespace: str | None) -> Any:
    """The schedule of a name.

    Raises:
        UsageError: There is none.
    """
    found = find(client, name, namespace)
    if found is None:
        raise UsageError(f"there is no schedule '{name}'")
    return found


def find(client: Client, name: str, namespace: str | None) -> Any | None:
    """The schedule of a name, in whatever experiment; None where there is none.

    Raises:
        UsageError: There are several, which only a person can tell apart.
    """
    wanted = json.dumps({"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]})
    found: list[Any] = []
    token = ""
    while True:
        page = client.list_recurring_runs(page_token=token, page_size=PAGE, namespace=namespace, filter=wanted)
        found += [run for run in page.recurring_runs or [] if run.display_name == name]
        if not (token := page.next_page_token or ""):
            break
    if len(found) > 1:
        ids = ", ".join(run.recurring_run_id for run in found)
        raise UsageError(f"there are {len(found)} schedules '{name}' ({ids}); delete all but one")
    return found[0] if found else None


def pinned_version(client: Client, pipeline: str, package: Path, version: str) -> tuple[str, str]:
    """The pipeline version of a name, uploaded where it is not there yet; ids of the pipeline and of the version."""
    pipeline_id = client.get_pipeline_id(pipeline)
    if pipeline_id is None:
        pipeline_id = client.upload_pipeline(str(package), pipeline).pipeline_id
    token = ""
    while True:
        page = client.list_pipeline_versions(pipeline_id, page_token=token, page_size=PAGE)
        for known in page.pipeline_versions or []:
            if known.display_name == version:
                return str(pipeline_id), str(known.pipeline_version_id)
        if not (token := page.next_page_token or ""):
            break
    made = client.upload_pipeline_version(str(package), version, pipeline_id=pipeline_id)
    return str(pipeline_id), str(made.pipeline_version_id)


def version_name(package: bytes) -> str:
    """Name of a compiled pipeline's version: the same text has the same name, so it is uploaded once."""
    return hashlib.sha256(package).hexdigest()[:12]


def is_same(found: Any, cron: str, version_id: str, service_account: str | None) -> bool:
    """Whether a schedule is what was asked for, and is enabled."""
    trigger = found.trigger.cron_schedule if found.trigger else None
    reference = found.pipeline_version_reference
    return bool(
        trigger
        and trigger.cron == cron
        and reference
        and reference.pipeline_version_id == version_id
        and found.status == "ENABLED"
        and found.no_catchup
        and str(found.max_concurrency) == "1"
        and service_account in (None, found.service_account)
    )


def pinned(client: Client, found: Any) -> tuple[str, Any]:
    """Name and text of the pipeline version that a schedule runs.

    Raises:
        UsageError: It is not pinned to one.
    """
    reference = found.pipeline_version_reference
    if reference is None or not reference.pipeline_version_id:
        raise UsageError(f"schedule '{found.display_name}' runs no pipeline version; schedule it anew")
    version = client.get_pipeline_version(reference.pipeline_id, reference.pipeline_version_id)
    return version.display_name, version.pipeline_spec


def differences(pinned_spec: Any, package: str, name: str) -> list[str]:
    """Lines of a unified diff from the pipeline that a schedule runs to a compiled one; none where they say the same.

    Args:
        pinned_spec: As the server gives it: the specification, or `pipeline_spec` and `platform_spec` together.
        package: Text of the compiled pipeline.
        name: What the scheduled one is called in the diff.
    """
    ours = list(YAML(typ="safe", pure=True).load_all(package))
    before, after = _lines(_both(pinned_spec)), _lines(_both(ours))
    return list(difflib.unified_diff(before, after, f"scheduled {name}", "compiled here", lineterm=""))


def _both(content: Any) -> dict[str, Any]:
    """A pipeline in one form, whether it came as one document, as two, or as a mapping of the two."""
    documents = content if isinstance(content, list) else [content]
    both: dict[str, Any] = {}
    for document in (each for each in documents if each):
        if "pipeline_spec" in document or "platform_spec" in document:
            both |= document
        else:
            both["pipeline_spec" if "pipelineInfo" in document else "platform_spec"] = document
    return both


def _lines(content: Mapping[str, Any]) -> list[str]:
    return json.dumps(_readable(content), indent=2, sort_keys=True).splitlines()


def _readable(content: Any) -> Any:
    """Texts of several lines as lists of lines: the run file is one, and a change in it shall be a line of the diff."""
    if isinstance(content, dict):
        return {key: _readable(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_readable(value) for value in content]
    return content.splitlines() if isinstance(content, str) and "\n" in content else content


def _message(refusal: Any) -> str:
    try:
        return str(json.loads(refusal.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(refusal.reason)
