"""Pod templates that would access the sidecar's volumes, Secrets or processes.

Each has the path of the offending field. The operator's own rules and the chart's admission policy are
tested with the same table.
"""

from __future__ import annotations

from typing import Any

SPEC = "spec.template.spec"


def template(**spec: Any) -> dict[str, Any]:
    spec.setdefault("containers", [{"name": "trainer", "image": "example/trainer:1"}])
    return {"spec": spec}


def trainer(**fields: Any) -> dict[str, Any]:
    return template(containers=[{"name": "trainer", "image": "example/trainer:1", **fields}])


def mounted(path: str, name: str = "data") -> dict[str, Any]:
    return trainer(volumeMounts=[{"name": name, "mountPath": path}])


def _claim_from(field: str) -> dict[str, Any]:
    source = {"kind": "PersistentVolumeClaim", "name": "gpt-abc123-0-r0-holdfast-node"}
    return {"volumeClaimTemplate": {"spec": {field: source}}}


MOUNT = f"{SPEC}.containers[0].volumeMounts[0]"

HOSTILE_TEMPLATES: dict[str, tuple[dict[str, Any], str]] = {
    "certificates mounted": (mounted("/c", "holdfast-certs"), f"{MOUNT}.name"),
    "store keys mounted": (mounted("/c", "holdfast-store"), f"{MOUNT}.name"),
    "node tier mounted": (mounted("/c", "holdfast-node"), f"{MOUNT}.name"),
    "second mount": (
        trainer(
            volumeMounts=[
                {"name": "data", "mountPath": "/data"},
                {"name": "holdfast-store", "mountPath": "/keys", "subPath": "secretKey"},
            ]
        ),
        f"{SPEC}.containers[0].volumeMounts[1].name",
    ),
    "by an init container": (
        template(
            containers=[{"name": "trainer"}],
            initContainers=[{"name": "x", "volumeMounts": [{"name": "holdfast-certs"}]}],
        ),
        f"{SPEC}.initContainers[0].volumeMounts[0].name",
    ),
    "by a second container": (
        template(
            containers=[
                {"name": "trainer"},
                {"name": "x", "volumeMounts": [{"name": "holdfast-store", "mountPath": "/k"}]},
            ]
        ),
        f"{SPEC}.containers[1].volumeMounts[0].name",
    ),
    "as a block device": (
        trainer(volumeDevices=[{"name": "holdfast-node", "devicePath": "/dev/x"}]),
        f"{SPEC}.containers[0].volumeDevices[0].name",
    ),
    "a volume of our name": (
        template(volumes=[{"name": "holdfast-shared", "emptyDir": {}}]),
        f"{SPEC}.volumes[0].name",
    ),
    "a container of our name": (
        template(containers=[{"name": "trainer"}, {"name": "holdfast-sidecar"}]),
        f"{SPEC}.containers[1].name",
    ),
    "the sidecar as an init container": (
        template(initContainers=[{"name": "holdfast-sidecar"}]),
        f"{SPEC}.initContainers[0].name",
    ),
    "process namespace": (template(shareProcessNamespace=True), f"{SPEC}.shareProcessNamespace"),
    "processes of the node": (template(hostPID=True), f"{SPEC}.hostPID"),
    "over our directory": (mounted("/holdfast/shared"), f"{MOUNT}.mountPath"),
    "over its parent": (mounted("/holdfast"), f"{MOUNT}.mountPath"),
    "with a slash at the end": (mounted("/holdfast/"), f"{MOUNT}.mountPath"),
    "two slashes at the start": (mounted("//holdfast/shared"), f"{MOUNT}.mountPath"),
    "two slashes inside": (mounted("/data//x"), f"{MOUNT}.mountPath"),
    "with a dot": (mounted("/./holdfast/shared"), f"{MOUNT}.mountPath"),
    "up and down again": (mounted("/data/../holdfast/shared"), f"{MOUNT}.mountPath"),
    "up at the end": (mounted("/holdfast/x/.."), f"{MOUNT}.mountPath"),
    "relative": (mounted("holdfast/shared"), f"{MOUNT}.mountPath"),
    "over everything": (mounted("/"), f"{MOUNT}.mountPath"),
    "certificates of a gang as a volume": (
        template(volumes=[{"name": "v", "secret": {"secretName": "gpt-abc123-certs-0-r0"}}]),
        f"{SPEC}.volumes[0].secret.secretName",
    ),
    "certificates for a CSI driver": (
        template(
            volumes=[
                {
                    "name": "v",
                    "csi": {"driver": "x", "nodePublishSecretRef": {"name": "a-certs-0-r0"}},
                }
            ]
        ),
        f"{SPEC}.volumes[0].csi.nodePublishSecretRef.name",
    ),
    "certificates for another driver": (
        template(
            volumes=[
                {"name": "v", "flexVolume": {"driver": "x", "secretRef": {"name": "a-certs-0-r0"}}}
            ]
        ),
        f"{SPEC}.volumes[0].flexVolume.secretRef.name",
    ),
    "certificates for a share of files": (
        template(
            volumes=[{"name": "v", "azureFile": {"shareName": "x", "secretName": "a-certs-0-r0"}}]
        ),
        f"{SPEC}.volumes[0].azureFile.secretName",
    ),
    "certificates in a projected volume": (
        template(
            volumes=[
                {
                    "name": "v",
                    "projected": {
                        "sources": [{"configMap": {}}, {"secret": {"name": "a-certs-0-r12"}}]
                    },
                }
            ]
        ),
        f"{SPEC}.volumes[0].projected.sources[1].secret.name",
    ),
    "certificates as a variable": (
        trainer(env=[{"name": "K", "valueFrom": {"secretKeyRef": {"name": "a-certs-0-r1"}}}]),
        f"{SPEC}.containers[0].env[0].valueFrom.secretKeyRef.name",
    ),
    "certificates as variables": (
        trainer(envFrom=[{"secretRef": {"name": "a-certs-0-r1"}}]),
        f"{SPEC}.containers[0].envFrom[0].secretRef.name",
    ),
    **{
        f"certificates for {kind}": (
            template(volumes=[{"name": "v", kind: {"secretRef": {"name": "a-certs-0-r0"}}}]),
            f"{SPEC}.volumes[0].{kind}.secretRef.name",
        )
        for kind in ("rbd", "iscsi", "cephfs", "cinder", "scaleIO", "storageos")
    },
    "certificates of adopted pods": (
        template(volumes=[{"name": "v", "secret": {"secretName": "gpt-holdfast-certs-0"}}]),
        f"{SPEC}.volumes[0].secret.secretName",
    ),
    "a file of our volume as a variable": (
        trainer(
            env=[
                {
                    "name": "K",
                    "valueFrom": {
                        "fileKeyRef": {"volumeName": "holdfast-certs", "path": "a", "key": "K"}
                    },
                }
            ]
        ),
        f"{SPEC}.containers[0].env[0].valueFrom.fileKeyRef.volumeName",
    ),
    "the node volume of another pod": (
        template(
            volumes=[
                {
                    "name": "v",
                    "persistentVolumeClaim": {"claimName": "gpt-abc123-0-r0-holdfast-node"},
                }
            ]
        ),
        f"{SPEC}.volumes[0].persistentVolumeClaim.claimName",
    ),
    **{
        f"a copy of another pod's node volume by {field}": (
            template(volumes=[{"name": "v", "ephemeral": _claim_from(field)}]),
            f"{SPEC}.volumes[0].ephemeral.volumeClaimTemplate.spec.{field}.name",
        )
        for field in ("dataSource", "dataSourceRef")
    },
}
