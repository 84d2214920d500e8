"""The API server refuses wrong input with a message that names field, value and remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.api_objects import (
    ABSENT,
    azure_store_object,
    checkpoint_object,
    google_store_object,
    job_object,
    merged,
    store_object,
)
from tests.support.servers.control_plane import ControlPlane, ControlPlaneError

pytestmark = pytest.mark.integration


def trainer(**changes: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", "image": "example/trainer:1", **changes}]}}


def elastic(peer: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return a job of 4 workers with an object store and these fields of elastic."""
    store = {"storeRef": {"name": "main"}, "every": {"steps": 100}}
    tiers = {"object": store} if peer is None else {"object": store, "peer": peer}
    return job_object(checkpoint=tiers, elastic=fields)


def ckpt(**changes: Any) -> dict[str, Any]:
    return job_object(checkpoint=changes)


def verified_store(**verify: Any) -> dict[str, Any]:
    """Return a store whose spec.verify has these fields."""
    store = store_object()
    return {**store, "spec": {**store["spec"], "verify": verify}}


def adoption(**checkpoint: Any) -> dict[str, Any]:
    job = job_object(checkpoint=checkpoint)
    spec = {name: value for name, value in job["spec"].items() if name != "template"}
    return {**job, "kind": "CheckpointAdoption", "spec": spec}


def grant_object(*given: dict[str, Any]) -> dict[str, Any]:
    """Return a CheckpointGrant to these jobs."""
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "CheckpointGrant",
        "metadata": {"name": "grant", "namespace": "team-a"},
        "spec": {"from": list(given)},
    }


STORED = {
    "storeRef": {"name": "main"},
    "jobUid": "0f5c8a3e-0000-4000-8000-000000000001",
    "jobNamespace": "research",
    "round": 3,
    "manifest": "b3:" + "0" * 64,
    "bytes": 1,
    "worldSize": 2,
}

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no workers": (
        job_object(workers=0),
        [
            "spec.workers:",
            "workers must be 1 to 4096, got 0: set the number of pods that train together",
        ],
    ),
    "too many workers": (job_object(workers=5000), ["workers must be 1 to 4096, got 5000"]),
    "no processes": (
        job_object(procsPerWorker=0),
        ["spec.procsPerWorker:", "procsPerWorker must be 1 to 64, got 0", "number of GPUs"],
    ),
    "interval of zero": (
        ckpt(interval={"steps": 0}),
        [
            "spec.checkpoint.interval.steps:",
            "must be 1 to 1000000000, got 0",
            "set the number of optimizer steps between two saves",
        ],
    ),
    "interval of steps and seconds": (
        ckpt(interval={"steps": 5, "seconds": 60}),
        [
            "spec.checkpoint.interval:",
            "checkpoint.interval has 2 of steps, seconds and auto, expected exactly one: "
            'write for example {"steps": 100}',
        ],
    ),
    "empty interval": (ckpt(interval={"steps": ABSENT}), ["has 0 of steps, seconds and auto"]),
    "interval of no time": (
        ckpt(interval={"seconds": 0}),
        ["spec.checkpoint.interval.seconds:", "must be 1 to 604800, got 0", "between two saves"],
    ),
    "no automatic interval": (
        ckpt(interval={"auto": False}),
        ["spec.checkpoint.interval.auto:", "auto is false, which names no interval"],
    ),
    "a time between failures without auto": (
        ckpt(interval={"seconds": 60, "mtbf": "6h"}),
        ["spec.checkpoint.interval.mtbf:", "has an effect only with auto: true: remove it"],
    ),
    "a time between failures that is no duration": (
        ckpt(interval={"auto": True, "mtbf": "a day"}),
        ["spec.checkpoint.interval.mtbf:", '"a day"', "6h"],
    ),
    "uploads by steps and by time": (
        ckpt(
            interval={"seconds": 60},
            object={"storeRef": {"name": "main"}, "every": {"steps": 100, "seconds": 600}},
        ),
        ["spec.checkpoint.object.every:", "has both or none of steps and seconds"],
    ),
    "no interval": (ckpt(interval=ABSENT), ["spec.checkpoint.interval: Required value"]),
    "no slots": (
        ckpt(memory={"slots": 0}),
        ["spec.checkpoint.memory.slots:", "must be 1 to 8, got 0", "1 needs the least memory"],
    ),
    "nine slots": (ckpt(memory={"slots": 9}), ["checkpoint.memory.slots must be 1 to 8, got 9"]),
    "memory limit is no quantity": (
        ckpt(memory={"sizeLimit": "8 Gi"}),
        ['checkpoint.memory.sizeLimit is "8 Gi", expected a quantity of bytes', "example 8Gi"],
    ),
    "node limit is no quantity": (
        ckpt(node={"volume": {"emptyDir": {"sizeLimit": "20GB"}}}),
        ["spec.checkpoint.node.volume.emptyDir.sizeLimit:", 'is "20GB"', "write for example 20Gi"],
    ),
    "node limit is zero": (
        ckpt(node={"volume": {"emptyDir": {"sizeLimit": "0"}}}),
        ['emptyDir.sizeLimit is "0", expected a quantity of bytes of at least 1Mi'],
    ),
    "thousandths of a byte": (
        ckpt(memory={"sizeLimit": "20m"}),
        ['memory.sizeLimit is "20m", expected a quantity of bytes of at least 1Mi', "thousandth"],
    ),
    "node volume of a class without a size": (
        ckpt(node={"volume": {"ephemeral": [{"storageClassName": "nvme"}]}}),
        ["spec.checkpoint.node.volume.ephemeral[0].size: Required value"],
    ),
    "node volume of a class with a wrong size": (
        ckpt(node={"volume": {"ephemeral": [{"storageClassName": "nvme", "size": "1TB"}]}}),
        ["spec.checkpoint.node.volume.ephemeral[0].size:", 'is "1TB"', "write for example 500Gi"],
    ),
    "node volumes of two classes": (
        ckpt(
            node={
                "volume": {
                    "ephemeral": [
                        {"storageClassName": "nvme-a", "size": "500Gi"},
                        {"storageClassName": "nvme-b", "size": "500Gi"},
                    ]
                }
            }
        ),
        [
            "spec.checkpoint.node.volume.ephemeral:",
            "checkpoint.node.volume.ephemeral must have at most 1 volume, got 2: to use several disks of a "
            "node, combine them into one RAID or LVM volume, and name the storage class of that volume",
        ],
    ),
    "node volume of a class for adopted pods": (
        adoption(node={"volume": {"ephemeral": [{"storageClassName": "nvme", "size": "1Ti"}]}}),
        ["spec.checkpoint.node.volume.ephemeral:", "not available for adopted pods", "sizeLimit"],
    ),
    "as many copies as workers": (
        job_object(workers=2, checkpoint={"peer": {"copies": 2}}),
        [
            "spec.checkpoint.peer.copies:",
            "checkpoint.peer.copies is 2, but only 1 other workers can keep copies of a shard "
            "(workers: 2): lower copies or add workers",
        ],
    ),
    "a copy with one worker, by default of peer": (
        job_object(workers=1, checkpoint={"peer": {}}),
        ["checkpoint.peer.copies is 1, but only 0 other workers"],
    ),
    "four copies": (
        ckpt(peer={"copies": 4}),
        ["checkpoint.peer.copies must be 0 to 3, got 4: 1 survives the loss of one node"],
    ),
    "negative copies": (ckpt(peer={"copies": -1}), ["must be 0 to 3, got -1"]),
    "encryption misspelt": (
        ckpt(peer={"encryption": "Off"}),
        ["spec.checkpoint.peer.encryption: Unsupported value", '"TLS", "None"'],
    ),
    "compression misspelt": (
        ckpt(object={"storeRef": {"name": "main"}, "every": {"steps": 100}, "compression": "zstd"}),
        ["spec.checkpoint.object.compression: Unsupported value", '"None", "Zstd"'],
    ),
    "upload between saves": (
        ckpt(object={"storeRef": {"name": "main"}, "every": {"steps": 120}}),
        [
            "spec.checkpoint.object.every.steps:",
            "checkpoint.object.every.steps is 120, not a multiple of checkpoint.interval.steps "
            "(50): only a step that is saved can be uploaded; choose a multiple",
        ],
    ),
    "keep one": (
        ckpt(retention={"keepLast": 1}),
        [
            "spec.checkpoint.retention.keepLast:",
            "must be 2 to 1000, got 1",
            "an older one is needed",
        ],
    ),
    "keepEvery by two measures": (
        ckpt(retention={"keepEvery": {"steps": 100, "duration": "6h"}}),
        ["spec.checkpoint.retention.keepEvery:", "both or none of steps and duration"],
    ),
    "keepFor in days": (
        ckpt(retention={"keepFor": "30d"}),
        ["spec.checkpoint.retention.keepFor:", "a duration above zero", "write for example 720h"],
    ),
    "the best of no metric": (
        ckpt(retention={"keepBest": {"metric": "", "mode": "min"}}),
        ["spec.checkpoint.retention.keepBest.metric:"],
    ),
    "the best without a direction": (
        ckpt(retention={"keepBest": {"metric": "loss", "mode": "lowest"}}),
        ["spec.checkpoint.retention.keepBest.mode: Unsupported value", '"min"', '"max"'],
    ),
    "more hours than a year": (
        ckpt(retention={"hourly": 9000}),
        ["spec.checkpoint.retention.hourly:", "must be 0 to 8760, got 9000"],
    ),
    "long rules without a store": (
        ckpt(retention={"daily": 7}),
        ["spec.checkpoint.retention:", "the job has none: set checkpoint.object"],
    ),
    "delete with the job": (
        ckpt(retention={"whenDeleted": "Delete"}),
        [
            "spec.checkpoint.retention.whenDeleted: Unsupported value",
            '"Retain", "DeleteData", "KeepLast"',
        ],
    ),
    "delete with the job, without a store": (
        ckpt(retention={"whenDeleted": "DeleteData"}),
        ["spec.checkpoint.retention:", "the job has none: set checkpoint.object"],
    ),
    "restoreFrom names a job and no checkpoint of it": (
        job_object(restoreFrom={"jobRef": {"name": "other"}}),
        ["spec.restoreFrom:", "has 0 of step, latest, before and best, expected exactly one"],
    ),
    "restoreFrom names a Checkpoint and a step": (
        job_object(restoreFrom={"checkpointRef": {"name": "other-s5-r0"}, "step": 5}),
        ["spec.restoreFrom:", "has 1 of step, latest, before and best, expected none"],
    ),
    "restoreFrom names two sources": (
        job_object(
            restoreFrom={
                "checkpointRef": {"name": "other-s5-r0"},
                "jobRef": {"name": "other"},
                "latest": True,
            }
        ),
        ["spec.restoreFrom:", "has 2 sources, expected exactly one"],
    ),
    "restoreFrom names nothing": (
        job_object(restoreFrom={}),
        ["spec.restoreFrom:", "expected exactly one: set checkpointRef.name"],
    ),
    "window is no duration": (
        job_object(failurePolicy={"window": "1 hour"}),
        ["spec.failurePolicy.window:", 'is "1 hour"', "write for example 1h"],
    ),
    "window in days": (job_object(failurePolicy={"window": "7d"}), ['window is "7d"']),
    "window of zero": (job_object(failurePolicy={"window": "0s"}), ['is "0s"', "above zero"]),
    "negative restarts": (
        job_object(failurePolicy={"maxRestarts": -1}),
        ["failurePolicy.maxRestarts must be 0 to 1000, got -1: 0 fails the job at the first"],
    ),
    "exit code zero": (
        job_object(failurePolicy={"rules": [{"onExitCodes": [3, 0], "action": "FailJob"}]}),
        ["spec.failurePolicy.rules[0].onExitCodes:", "outside of 1 to 255: 0 means success"],
    ),
    "a signal as an exit code": (
        job_object(failurePolicy={"rules": [{"onExitCodes": [-9], "action": "FailJob"}]}),
        ["onExitCodes contains a code outside", "signal n ended has code 128 + n"],
    ),
    "unknown action": (
        job_object(failurePolicy={"rules": [{"onExitCodes": [3], "action": "Retry"}]}),
        ["spec.failurePolicy.rules[0].action: Unsupported value", '"FailJob"', '"RestartPod"'],
    ),
    "unknown reason": (
        job_object(failurePolicy={"rules": [{"onReasons": ["Evicted"], "action": "Ignore"}]}),
        ["spec.failurePolicy.rules[0].onReasons[0]: Unsupported value", '"PodEvicted"'],
    ),
    "a rule that matches nothing": (
        job_object(failurePolicy={"rules": [{"action": "FailJob"}]}),
        ["spec.failurePolicy.rules[0]:", "has 0 of onExitCodes, onReasons", "expected exactly one"],
    ),
    "a rule of two kinds": (
        job_object(
            failurePolicy={
                "rules": [{"onExitCodes": [3], "onReasons": ["PodLost"], "action": "FailJob"}]
            }
        ),
        ["has 2 of onExitCodes, onReasons", "write one rule for each"],
    ),
    "quarantine at once": (
        job_object(failurePolicy={"quarantineAfter": 0}),
        ["failurePolicy.quarantineAfter must be 1 to 20, got 0: 3 leaves room"],
    ),
    "a released step below zero": (
        job_object(failurePolicy={"releasedSteps": [-1]}),
        ["releasedSteps contains a number below 0: write the step of an entry"],
    ),
    "start over after days": (
        job_object(failurePolicy={"startOver": {"atMost": "7d"}}),
        ['failurePolicy.startOver.atMost is "7d"', "write for example 30m, or 0s"],
    ),
    "start over after less than nothing": (
        job_object(failurePolicy={"startOver": {"atMost": "-5m"}}),
        ['failurePolicy.startOver.atMost is "-5m"'],
    ),
    "a confirmed round below zero": (
        job_object(rollback={"round": -1}),
        ["rollback.round must be at least 0, got -1: write the round of the newest"],
    ),
    "avoid a node after no failure": (
        job_object(failurePolicy={"avoidNodes": {"failures": 0}}),
        ["failurePolicy.avoidNodes.failures must be 1 to 20, got 0: 1 avoids a node after"],
    ),
    "avoid nodes for a day": (
        job_object(failurePolicy={"avoidNodes": {"window": "1d"}}),
        ['failurePolicy.avoidNodes.window is "1d"', "write for example 24h"],
    ),
    "a hang after one step time": (
        job_object(failurePolicy={"hangs": {"stepTimes": 1}}),
        ["failurePolicy.hangs.stepTimes must be 2 to 10000, got 1: 10 suits most trainings"],
    ),
    "a hang after a second": (
        job_object(failurePolicy={"hangs": {"seconds": 1}}),
        [
            "failurePolicy.hangs.seconds must be 10 to 604800, got 1: write more than the longest step"
        ],
    ),
    "a hang after two limits": (
        job_object(failurePolicy={"hangs": {"seconds": 600, "stepTimes": 20}}),
        ["failurePolicy.hangs has stepTimes 20 and seconds 600, expected at most one"],
    ),
    "a limit of hangs that are not detected": (
        job_object(failurePolicy={"hangs": {"detection": "Off", "seconds": 600}}),
        ["failurePolicy.hangs has detection Off and a limit: omit"],
    ),
    "a hang that is switched off by no": (
        job_object(failurePolicy={"hangs": {"detection": "No"}}),
        ["spec.failurePolicy.hangs.detection: Unsupported value", '"Off"', '"On"'],
    ),
    "every rank is a straggler": (
        job_object(failurePolicy={"stragglers": {"factor": 1}}),
        ["failurePolicy.stragglers.factor must be 1.1 to 100, got 1.00: 1.5 shows ranks"],
    ),
    "a straggler without a step": (
        job_object(failurePolicy={"stragglers": {"steps": 0}}),
        ["failurePolicy.stragglers.steps must be 1 to 1000000, got 0: 30 suits most trainings"],
    ),
    "a limit of stragglers that are not looked for": (
        job_object(failurePolicy={"stragglers": {"detection": "Off", "factor": 2}}),
        ["failurePolicy.stragglers has detection Off and a limit: omit"],
    ),
    "nervous about nodes": (
        job_object(nodeLoss={"suspectAfterSeconds": 5}),
        ["nodeLoss.suspectAfterSeconds must be 15 to 3600, got 5", "renews its lease every 10 s"],
    ),
    "a gang that must be scheduled within a second": (
        job_object(scheduleTimeoutSeconds=1),
        ["scheduleTimeoutSeconds is 1, expected 0 or at least 30", "0 lets pods wait"],
    ),
    "a gang that is never given time": (
        job_object(scheduleTimeoutSeconds=-1),
        ["scheduleTimeoutSeconds must be 0 to 604800, got -1: 0 lets pods wait for their nodes"],
    ),
    "more spares than certificates in a Secret": (
        job_object(spares=65),
        ["spares must be 0 to 64, got 65: 0 keeps no spare pods"],
    ),
    "fewer spares than none": (job_object(spares=-1), ["spares must be 0 to 64, got -1"]),
    "elastic without a store": (
        job_object(elastic={"min": 1}),
        ["spec.elastic:", "elastic needs an object store", "set checkpoint.object, or remove"],
    ),
    "an elastic gang of none": (
        elastic(min=0),
        ["elastic.min must be 1 to 4096, got 0: set the smallest number of pods"],
    ),
    "min above max": (
        elastic(min=4, max=3),
        ["elastic.min is 4, more than elastic.max 3: lower min or raise max"],
    ),
    "min above workers": (
        elastic(min=5, max=8),
        ["spec.elastic.min:", "elastic.min is 5, more than workers 4", "or raise workers"],
    ),
    "workers above max": (
        elastic(min=2, max=3),
        ["spec.workers:", "workers is 4, more than elastic.max 3: lower workers or raise"],
    ),
    "as many copies as min": (
        elastic({"copies": 2}, min=2),
        ["elastic.min is 2, but checkpoint.peer.copies 2 needs at least 3 workers"],
    ),
    "an elastic gang that shrinks within a second": (
        elastic(min=2, shrinkAfterSeconds=1),
        ["elastic.shrinkAfterSeconds must be 30 to 604800, got 1"],
    ),
    "an elastic gang that gives its nodes back before it shrinks": (
        elastic(min=2, shrinkAfterSeconds=1200),
        ["elastic.shrinkAfterSeconds is 1200, but after scheduleTimeoutSeconds 900 the gang"],
    ),
    "an elastic gang that grows all the time": (
        elastic(min=2, growAfterSeconds=1),
        ["elastic.growAfterSeconds must be 60 to 604800, got 1: each growth costs a save"],
    ),
    "deadline of zero": (
        job_object(activeDeadlineSeconds=0),
        ["activeDeadlineSeconds must be 1 to 315360000, got 0: omit it for no deadline"],
    ),
    "negative ttl": (
        job_object(ttlSecondsAfterFinished=-1),
        ["ttlSecondsAfterFinished must be 0 to 315360000, got -1: omit it to keep the job"],
    ),
    "no trainer": (
        job_object(template=trainer(name="main")),
        [
            "spec.template.spec.containers:",
            'template.spec.containers has 0 containers named "trainer", exactly one is expected: '
            'name the container that runs the training "trainer"',
        ],
    ),
    "two trainers": (
        job_object(template={"spec": {"containers": [{"name": "trainer"}, {"name": "trainer"}]}}),
        ['has 2 containers named "trainer"', "exactly one is expected"],
    ),
    "no launcher": (
        job_object(template=trainer(command=["python", "train.py"])),
        ["spec.template.spec.containers:", "does not use the launcher", "put `holdfast run --`"],
    ),
    "pod restarts never": (
        job_object(template={"spec": {"restartPolicy": "Never"}}),
        [
            "spec.template.spec.restartPolicy:",
            "is Never, expected OnFailure",
            "omit the field",
        ],
    ),
    "no template": (job_object(template=ABSENT), ["spec.template: Required value"]),
    "long name": (
        job_object(name="a" * 41),
        [f'metadata.name is "{"a" * 41}" (41 characters), expected at most 40', "choose a shorter"],
    ),
    "name with dots": (job_object(name="gpt.small"), ['metadata.name is "gpt.small"']),
    "name starts with a digit": (job_object(name="7b"), ['metadata.name is "7b"', "letter first"]),
    "endpoint without scheme": (
        store_object(endpoint="minio.storage.svc:9000"),
        [
            "spec.s3.endpoint:",
            's3.endpoint is "minio.storage.svc:9000", expected http(s)://host:port without a path: '
            "write for example https://minio.storage.svc:9000",
        ],
    ),
    "endpoint with a path": (
        store_object(endpoint="https://s3.example/bucket"),
        ["without a path"],
    ),
    "endpoint of another scheme": (store_object(endpoint="s3://bucket"), ['is "s3://bucket"']),
    "endpoint without host": (store_object(endpoint="https://"), ['s3.endpoint is "https://"']),
    **{
        f"endpoint {endpoint}": (
            store_object(endpoint=endpoint),
            ["spec.s3.endpoint:", f's3.endpoint is "{endpoint}", expected http(s)://host:port'],
        )
        for endpoint in (
            "http://h:0",
            "http://h:00",
            "http://h:65536",
            "http://h:99999999999",
            "http://h:",
            "http://[::1]:0",
            "http://user:word@h:9000",
            "http://h:9000?x=y",
            "http://h:9000#x",
            "http://:9000",
            "http://h:9000/%2e",
        )
    },
    "bucket with a slash": (
        store_object(bucket="team/checkpoints"),
        ["spec.s3.bucket:", 's3.bucket is "team/checkpoints"', "only the name of the bucket"],
    ),
    "prefix with a slash at its start": (
        store_object(prefix="/a"),
        ["spec.s3.prefix:", 's3.prefix is "/a"', "remove the slash"],
    ),
    "small parts": (
        store_object(partSizeMiB=4),
        ["spec.s3.partSizeMiB:", "s3.partSizeMiB must be 5 to 5120, got 4: S3 takes parts of 5"],
    ),
    "no concurrency": (
        store_object(maxConcurrency=0),
        ["s3.maxConcurrency must be 1 to 64, got 0: 4 suits most"],
    ),
    "no credentials": (
        store_object(credentialsSecretRef=ABSENT),
        ["spec.s3.credentialsSecretRef: Required value"],
    ),
    "a store in no place": (
        {**store_object(), "spec": {}},
        ["the store has none or several of s3, azure and google: set one of them"],
    ),
    "a store in two places": (
        merged(store_object(), azure_store_object()),
        ["the store has none or several of s3, azure and google: set one of them"],
    ),
    "a store in three places": (
        merged(merged(store_object(), azure_store_object()), google_store_object()),
        ["the store has none or several of s3, azure and google: set one of them"],
    ),
    "google bucket with a scheme": (
        google_store_object(bucket="gs://checkpoints"),
        ["spec.google.bucket:", "write only the name of the bucket, without scheme"],
    ),
    "google prefix with a slash at its end": (
        google_store_object(prefix="a/"),
        ["spec.google.prefix:", 'google.prefix is "a/"', "remove the slash"],
    ),
    "google endpoint with a path": (
        google_store_object(endpoint="https://storage.googleapis.com/checkpoints"),
        ["spec.google.endpoint:", "expected http(s)://host:port without a path"],
    ),
    "the host of an account": (
        azure_store_object(account="teamastore.blob.core.windows.net"),
        ["spec.azure.account:", "only the name of the account, without its host"],
    ),
    "container with a capital": (
        azure_store_object(container="Checkpoints"),
        ["spec.azure.container:", 'azure.container is "Checkpoints"'],
    ),
    "azure prefix with a slash at its end": (
        azure_store_object(prefix="a/"),
        ["spec.azure.prefix:", 'azure.prefix is "a/"', "remove the slash"],
    ),
    "azure endpoint with a path": (
        azure_store_object(endpoint="https://teamastore.blob.core.windows.net/checkpoints"),
        ["spec.azure.endpoint:", "expected http(s)://host:port without a path"],
    ),
    "azure without keys": (
        azure_store_object(credentialsSecretRef=ABSENT),
        ["azure has none or both of credentialsSecretRef and webIdentity: set one of them"],
    ),
    "azure with keys and an identity": (
        azure_store_object(webIdentity={"clientId": "c", "tenantId": "t"}),
        ["azure has none or both of credentialsSecretRef and webIdentity: set one of them"],
    ),
    "an identity that is a URL": (
        azure_store_object(
            credentialsSecretRef=ABSENT,
            webIdentity={"clientId": "https://c", "tenantId": "t"},
        ),
        ["spec.azure.webIdentity.clientId:", 'azure.webIdentity has the id "https://c"'],
    ),
    "drills all the time": (
        verified_store(every="5s"),
        ["spec.verify.every:", 'verify.every is "5s", expected a duration of at least 1m', "24h"],
    ),
    "drills each day": (
        verified_store(every="1d"),
        ['verify.every is "1d", expected a duration of at least 1m with units h, m, s or ms'],
    ),
    "a sample of none": (
        verified_store(sample=0),
        ["spec.verify.sample:", "verify.sample must be 1 to 100, got 0: 1 suits most"],
    ),
    "a drill without a trigger": (
        checkpoint_object(verify={"restore": True}),
        ["spec.verify.trigger: Required value"],
    ),
    "a drill for ranks without a restore": (
        checkpoint_object(verify={"trigger": "now", "worldSize": 4}),
        ["spec.verify.worldSize:", "is the number of ranks of verify.restore: set restore to true"],
    ),
    "a drill for too many ranks": (
        checkpoint_object(verify={"trigger": "now", "restore": True, "worldSize": 4097}),
        ["verify.worldSize must be 1 to 4096, got 4097: omit it to let the operator choose"],
    ),
    "checkpoint of no job": (checkpoint_object(jobRef=ABSENT), ["spec.jobRef: Required value"]),
    "negative step": (
        checkpoint_object(step=-1),
        ["spec.step:", "step must be at least 0, got -1: omit it to save now"],
    ),
    "unknown deletion policy": (
        checkpoint_object(deletionPolicy="Delete"),
        ["spec.deletionPolicy: Unsupported value", '"DeleteData"', '"Retain"'],
    ),
    "imported checkpoint of no step": (
        checkpoint_object(stored=STORED),
        ["stored names a checkpoint that exists, so step must say which one it is"],
    ),
    "imported checkpoint without its manifest": (
        checkpoint_object(step=100, stored={**STORED, "manifest": ABSENT}),
        ["spec.stored.manifest: Required value"],
    ),
    "grant to a pattern": (
        grant_object({"namespace": "team-*"}),
        ['from.namespace is "team-*", expected the name of one namespace'],
    ),
    "grant to nobody": (
        grant_object(),
        ["from is empty, so the grant permits nothing: name the namespace of the jobs"],
    ),
    "source in no namespace": (
        job_object(restoreFrom={"checkpointRef": {"name": "a", "namespace": "Team A"}}),
        ['checkpointRef.namespace is "Team A", expected the name of a namespace'],
    ),
    "misspelt field": (
        ckpt(intervall={"steps": 5}),
        ['unknown field "spec.checkpoint.intervall"'],
    ),
}


@pytest.mark.fault("A user gives an endpoint such as `http://h:0` to the API server")
@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(cluster: ControlPlane, case: str) -> None:
    data, expected = REFUSED[case]
    words = cluster.kubectl(
        "create", "--dry-run=server", "-f", "-", stdin=json.dumps(data), check=False
    )
    assert [text for text in expected if text not in words] == [], words


ACCEPTED: dict[str, dict[str, Any]] = {
    "smallest job": job_object(),
    "start over never": job_object(failurePolicy={"startOver": {"atMost": "0s"}}),
    "start over after hours": job_object(failurePolicy={"startOver": {"atMost": "1h30m"}}),
    "drills with the defaults": verified_store(),
    "drills of several": verified_store(every="1h30m", sample=3, restore=True),
    "a drill of one checkpoint": checkpoint_object(verify={"trigger": "now"}),
    "a drill of one checkpoint for ranks": checkpoint_object(
        verify={"trigger": "now", "restore": True, "worldSize": 4}
    ),
    "a rollback": job_object(rollback={"round": 0, "step": 0}),
    "a start over": job_object(rollback={"round": 7}),
    "the newest of a job": job_object(restoreFrom={"jobRef": {"name": "other"}, "latest": True}),
    "a step of a job": job_object(restoreFrom={"jobRef": {"name": "other"}, "step": 0}),
    "before a time": job_object(
        restoreFrom={"jobRef": {"name": "other"}, "before": "2026-05-01T12:00:00Z"}
    ),
    "the best of a job": job_object(
        restoreFrom={"jobRef": {"name": "other"}, "best": {"metric": "loss", "mode": "min"}}
    ),
    "one worker without peers": job_object(workers=1),
    "one worker, no copies": job_object(workers=1, checkpoint={"peer": {"copies": 0}}),
    "longest name": job_object(name="a" * 40),
    "node volume of a class": ckpt(
        node={"volume": {"ephemeral": [{"storageClassName": "nvme", "size": "500Gi"}]}}
    ),
    "most workers": job_object(workers=4096),
    "everything": job_object(
        procsPerWorker=8,
        checkpoint={
            "memory": {"slots": 3, "sizeLimit": "12Gi"},
            "node": {"volume": {"emptyDir": {"sizeLimit": "1.5Ti"}}},
            "peer": {"copies": 2, "topologyKey": "example.com/rack", "encryption": "TLS"},
            "object": {
                "storeRef": {"name": "main"},
                "every": {"steps": 500},
                "compression": "Zstd",
            },
            "retention": {
                "keepLast": 2,
                "keepEvery": {"duration": "6h"},
                "keepFor": "48h",
                "hourly": 24,
                "daily": 7,
                "keepBest": {"metric": "val_loss", "mode": "min", "count": 3},
                "whenDeleted": "Retain",
            },
        },
        restoreFrom={"checkpointRef": {"name": "other-job-s1200-r2"}},
        failurePolicy={
            "maxRestarts": 0,
            "window": "90m30s",
            "quarantineAfter": 20,
            "avoidNodes": {"failures": 20, "window": "168h"},
            "releasedSteps": [0, 4200],
            "rules": [
                {"onExitCodes": [3, 255], "action": "FailJob"},
                {"onReasons": ["OOMKilled", "NodeLost"], "action": "RestartPod"},
                {"onPodConditions": [{"type": "DisruptionTarget"}], "action": "Ignore"},
                {
                    "onPodConditions": [{"type": "a.b/c", "status": "False"}],
                    "action": "RestartGang",
                },
            ],
        },
        nodeLoss={"suspectAfterSeconds": 15},
        suspend=True,
        scheduleTimeoutSeconds=0,
        spares=64,
        elastic={"min": 3, "max": 4, "shrinkAfterSeconds": 604800, "growAfterSeconds": 60},
        activeDeadlineSeconds=86400,
        ttlSecondsAfterFinished=0,
    ),
    "launcher in a shell": job_object(
        template=trainer(command=["sh", "-c", "exec holdfast run -- python train.py"])
    ),
    "launcher in the arguments": job_object(
        template=trainer(command=["tini", "--"], args=["holdfast", "run", "--", "python", "t.py"])
    ),
    "launcher as a module": job_object(
        template=trainer(command=["python", "-m", "holdfast.run", "--", "python", "t.py"])
    ),
    "launcher in the image": job_object(template=trainer(args=["--lr", "0.1"])),
    "request to save": checkpoint_object(),
    "grant to a namespace": grant_object({"namespace": "team-b"}),
    "imported checkpoint": checkpoint_object(step=100, stored=STORED),
    "pin": checkpoint_object(step=100, pin=True, deletionPolicy="DeleteData"),
    "smallest store": store_object(),
    "store at an IPv6 address": store_object(endpoint="http://[::1]:9000"),
    "store at the last port": store_object(endpoint="http://minio:65535/"),
    "https store": store_object(
        endpoint="https://s3.eu-central-1.example.com",
        prefix="team-a/runs",
        caSecretRef={"name": "ca"},
        partSizeMiB=5,
    ),
    "smallest azure store": azure_store_object(),
    "smallest google store": google_store_object(),
    "google store with a key": google_store_object(
        bucket="team_a.example.com", prefix="runs", credentialsSecretRef={"name": "store-keys"}
    ),
    "azure store of another cloud with an identity": azure_store_object(
        endpoint="https://teamastore.blob.core.usgovcloudapi.net",
        prefix="team-a/runs",
        credentialsSecretRef=ABSENT,
        webIdentity={
            "clientId": "0b0f6d2c-0000-4000-8000-000000000001",
            "tenantId": "example.onmicrosoft.com",
            "authority": "https://login.microsoftonline.us",
        },
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_good_input_is_accepted(cluster: ControlPlane, case: str) -> None:
    cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(ACCEPTED[case]))


WITH_STORE = job_object(
    "immutable", checkpoint={"object": {"storeRef": {"name": "main"}, "every": {"steps": 100}}}
)

CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no workers": (WITH_STORE, {"workers": 0}, "workers must be 1 to 4096, got 0"),
    "fewer workers than copies": (
        WITH_STORE,
        {"workers": 2, "checkpoint": {"peer": {"copies": 2}}},
        "checkpoint.peer.copies is 2, but only 1 other workers can keep copies of a shard",
    ),
    "procsPerWorker": (
        WITH_STORE,
        {"procsPerWorker": 2},
        "procsPerWorker is immutable (1, found 2): shards are saved by rank; create a new job",
    ),
    "other store": (
        WITH_STORE,
        {"checkpoint": {"object": {"storeRef": {"name": "other"}}}},
        "checkpoint.object.storeRef is immutable",
    ),
    "store removed": (WITH_STORE, {"checkpoint": {"object": ABSENT}}, "storeRef is immutable"),
    "store added": (
        job_object("immutable-without"),
        {"checkpoint": {"object": {"storeRef": {"name": "a"}, "every": {"steps": 50}}}},
        "storeRef is immutable",
    ),
    "job of a checkpoint": (
        checkpoint_object(),
        {"jobRef": {"name": "other"}},
        "jobRef is immutable: a checkpoint belongs to the job that saved it",
    ),
    "step of a checkpoint": (
        checkpoint_object("with-step", step=100),
        {"step": 150},
        "step is immutable once it is set",
    ),
    "where an imported checkpoint lies": (
        checkpoint_object("imported", step=100, stored=STORED),
        {"stored": {"round": 7}},
        "stored is immutable",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_must_not_change(cluster: ControlPlane, case: str) -> None:
    data, change, expected = CHANGES[case]
    cluster.apply(data)
    with pytest.raises(ControlPlaneError) as refused:
        cluster.apply({**data, "spec": merged(data["spec"], change)})
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("data", "change"),
    [
        pytest.param(WITH_STORE, {"suspend": True}, id="suspend"),
        pytest.param(WITH_STORE, {"workers": 5}, id="workers"),
        pytest.param(WITH_STORE, {"checkpoint": {"interval": {"steps": 25}}}, id="interval"),
        pytest.param(
            WITH_STORE, {"checkpoint": {"object": {"every": {"steps": 50}}}}, id="upload interval"
        ),
        pytest.param(checkpoint_object("fills-step"), {"step": 7}, id="step is set once"),
        pytest.param(checkpoint_object("pinned"), {"pin": True}, id="pin"),
    ],
)
def test_what_may_change(
    cluster: ControlPlane, data: dict[str, Any], change: dict[str, Any]
) -> None:
    cluster.apply(data)
    cluster.apply({**data, "spec": merged(data["spec"], change)})
