"""What of scheduling needs no server: when a schedule is left alone, what its version is called, how texts differ.

The calls themselves are not tested: there is no Kubeflow Pipelines server to be had here, and a stand-in for one would
only repeat what its author believes of it. The objects are those that the real client makes of a server's answers.
"""

from __future__ import annotations

import pytest
from kfp_server_api import (
    V2beta1CronSchedule,
    V2beta1PipelineVersionReference,
    V2beta1RecurringRun,
    V2beta1Trigger,
)

from components.errors import UsageError
from pipelines.kubeflow.schedule import differences, is_same, pinned, version_name

CRON = "0 0 3 * * 1"


def recurring(**changed):
    content = {
        "recurring_run_id": "1",
        "display_name": "caltune-retrain-quick",
        "trigger": V2beta1Trigger(cron_schedule=V2beta1CronSchedule(cron=CRON)),
        "pipeline_version_reference": V2beta1PipelineVersionReference(pipeline_id="p", pipeline_version_id="v"),
        "status": "ENABLED",
        "no_catchup": True,
        "max_concurrency": "1",
        "service_account": "default-editor",
    }
    return V2beta1RecurringRun(**(content | changed))


def test_a_schedule_that_is_as_asked_for_is_left_alone():
    assert is_same(recurring(), CRON, "v", None)
    assert is_same(recurring(), CRON, "v", "default-editor")


@pytest.mark.parametrize(
    "changed",
    [
        {"trigger": V2beta1Trigger(cron_schedule=V2beta1CronSchedule(cron="0 0 4 * * 1"))},
        {"trigger": None},
        {"pipeline_version_reference": V2beta1PipelineVersionReference(pipeline_id="p", pipeline_version_id="old")},
        {"pipeline_version_reference": None},
        {"status": "DISABLED"},
        {"no_catchup": False},
        {"no_catchup": None},
        {"max_concurrency": "2"},
    ],
)
def test_a_schedule_that_differs_is_replaced(changed):
    assert not is_same(recurring(**changed), CRON, "v", None)


def test_another_account_is_a_difference():
    assert not is_same(recurring(), CRON, "v", "caltune-scheduler")


def test_a_schedule_without_a_version_is_named():
    with pytest.raises(UsageError, match="caltune-retrain-quick"):
        pinned(None, recurring(pipeline_version_reference=None))


def test_a_version_is_named_after_its_text():
    assert version_name(b"one") == version_name(b"one")
    assert version_name(b"one") != version_name(b"two")
    assert len(version_name(b"one")) == 12


@pytest.mark.parametrize("form", ["one mapping", "two documents"])
def test_what_was_uploaded_does_not_differ_from_itself(text, compiled, form):
    spec, platform = compiled("retrain")
    stored = {"pipeline_spec": spec, "platform_spec": platform} if form == "one mapping" else [spec, platform]
    assert differences(stored, text("retrain"), "abc") == []


def test_a_change_of_the_run_file_is_one_line(text, compiled):
    spec, platform = compiled("retrain")
    lines = differences(
        {"pipeline_spec": spec, "platform_spec": platform}, text("retrain").replace("seed: 0", "seed: 1"), "abc"
    )
    assert lines[:2] == ["--- scheduled abc", "+++ compiled here"]
    changed = [line for line in lines[2:] if line.startswith(("-", "+"))]
    assert [line.strip(' -+",') for line in changed] == ["seed: 0", "seed: 1"]


def test_a_missing_volume_is_shown(text, compiled):
    """A server that keeps the specification alone has no claim to mount."""
    lines = differences(compiled("retrain")[0], text("retrain"), "abc")
    assert any(line.startswith("+") and "caltune-data" in line for line in lines)
