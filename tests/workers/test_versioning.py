"""What a worker tells Temporal of its version."""

from __future__ import annotations

import pytest
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion

from workers.registry import WORKFLOWS, WorkerKind
from workers.run import deployment_of
from workers.settings import Settings


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (WorkerKind.CONTROL, "reelgate-control"),
        (WorkerKind.CALLBACK, "reelgate-callback"),
        (WorkerKind.GPU, "reelgate-gpu-large"),
    ],
)
def test_each_pool_is_a_deployment_of_its_own_whose_runs_go_on_under_a_new_version(kind: WorkerKind, name: str) -> None:
    config = deployment_of(kind, Settings(pool="large", build_id="7", worker_versioning=True))
    assert config is not None
    assert config.version == WorkerDeploymentVersion(deployment_name=name, build_id="7")
    assert config.use_worker_versioning
    assert config.default_versioning_behavior is VersioningBehavior.AUTO_UPGRADE


def test_without_the_setting_a_worker_is_outside_of_any_deployment() -> None:
    assert all(deployment_of(kind, Settings()) is None for kind in WorkerKind)


def test_no_workflow_names_a_behaviour_of_its_own() -> None:
    behaviours = {getattr(kind, "__temporal_workflow_definition").versioning_behavior for kind in WORKFLOWS}
    assert behaviours == {VersioningBehavior.UNSPECIFIED}
