"""The CronJob of examples/verify is one that the command reads and that restricted namespaces admit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from holdfast_core.contract import DrillContract, StoreConfig

EXAMPLE = Path(__file__).parents[3] / "examples/verify/daily.yaml"


def test_the_variables_of_the_example_are_valid() -> None:
    pod = _pod()
    (container,) = pod["containers"]
    env = {item["name"]: item["value"] for item in container["env"]}
    assert container["command"] == ["holdfast-sidecar", "drill"]
    config = StoreConfig.from_json(env["HOLDFAST_STORE"])
    assert (config.endpoint, config.secure, config.bucket) == ("s3.example", True, "checkpoints")
    wanted = DrillContract.from_json(env["HOLDFAST_DRILL"])
    assert (wanted.namespace, wanted.step, wanted.world_size) == ("team-a", None, 8)
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == env["HOLDFAST_STORE_DIR"]


def test_the_example_complies_with_the_restricted_profile() -> None:
    pod = _pod()
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"] == {"memory": "256Mi"}


def _pod() -> dict[str, Any]:
    found = yaml.safe_load(EXAMPLE.read_text())
    pod: dict[str, Any] = found["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return pod
