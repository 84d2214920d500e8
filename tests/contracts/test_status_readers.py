"""Each field of a TrainingJob's status has a reader: a column, the CLI, or the operator after a restart.

What only a metric or an Event has to tell is no field: etcd stores the whole status at each write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from holdfast_core.api import TrainingJob
from holdfast_core.api.crd import crd

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = ROOT / "operator/src/holdfast_operator"
CLI = ROOT / "cli/src/holdfast_cli"
COLUMN = "column"
"""The reader is a column of `kubectl get`."""
VIEWS = "views.py"
"""The reader is `kubectl holdfast status`."""
MOST_FIELDS = 80

READERS = {
    "phase": COLUMN,
    "restartRound": COLUMN,
    "restarts": COLUMN,
    "recentRestarts": "decide/facts/evidence.py",
    "recentRestarts.round": "decide/facts/evidence.py",
    "recentRestarts.at": "decide/facts/evidence.py",
    "recentRestarts.ignored": "decide/facts/evidence.py",
    "recentRestarts.failedFrom": "decide/facts/evidence.py",
    "quarantined": "decide/facts/readable.py",
    "missing": "decide/facts/readable.py",
    "hangs": "decide/report/conditions.py",
    "hangs.step": "decide/report/conditions.py",
    "hangs.restarts": "decide/report/conditions.py",
    "nodeFailures": "decide/facts/nodes.py",
    "nodeFailures.node": "decide/facts/nodes.py",
    "nodeFailures.at": "decide/facts/nodes.py",
    "nodeFailures.lateInRound": "decide/facts/scheduling.py",
    "nodeFailures.byRule": "decide/facts/nodes.py",
    "step": COLUMN,
    "lastCommittedStep": COLUMN,
    "lastReplicatedStep": COLUMN,
    "flushSeconds": "model/template.py",
    "lastPersisted": "decide/facts/readable.py",
    "lastPersisted.step": COLUMN,
    "lastPersisted.round": "decide/gang.py",
    "lastPersisted.manifest": "decide/gang.py",
    "members": "decide/facts/world.py",
    "coordinator": "decide/facts/world.py",
    "restorePoint": "decide/facts/readable.py",
    "restorePoint.step": "decide/facts/readable.py",
    "restorePoint.round": "decide/facts/evidence.py",
    "restorePoint.jobUid": "decide/gang.py",
    "restorePoint.jobNamespace": "decide/gang.py",
    "lineage": "decide/facts/world.py",
    "lineage.round": "decide/facts/world.py",
    "lineage.base": "decide/facts/world.py",
    "lineage.baseManifest": "decide/gang.py",
    "lineage.rolledBackFrom": "decide/gang.py",
    "recoveries": VIEWS,
    "recoveries.round": VIEWS,
    "recoveries.reason": VIEWS,
    "recoveries.workers": VIEWS,
    "recoveries.nodes": VIEWS,
    "recoveries.begunAt": "decide/report/recovery.py",
    "recoveries.phaseSeconds": VIEWS,
    "recoveries.totalSeconds": VIEWS,
    "recoveries.restoredStep": VIEWS,
    "recoveries.sources": VIEWS,
    "recoveries.lostSteps": VIEWS,
    "goodput": COLUMN,
    "goodput.ratio": COLUMN,
    "goodput.trainingSeconds": "decide/report/status.py",
    "goodput.checkpointSeconds": "decide/report/status.py",
    "goodput.recoverySeconds": "decide/report/status.py",
    "goodput.lostWorkSeconds": "decide/report/status.py",
    "trainedSeconds": "decide/facts/rollback.py",
    "chosenAt": "decide/facts/rollback.py",
    "expectedMtbfSeconds": "decide/gang.py",
    "stragglers": VIEWS,
    "scheduling": "decide/facts/scheduling.py",
    "scheduling.timeouts": "decide/facts/scheduling.py",
    "scheduling.retryAt": "decide/facts/scheduling.py",
    "resize": "decide/facts/sizes.py",
    "resize.round": "decide/checkpoints.py",
    "resize.fromWorkers": "decide/facts/sizes.py",
    "resize.refusedWorkers": "decide/facts/sizes.py",
    "resize.refusedOfWorkers": "decide/facts/sizes.py",
    "elastic": "decide/facts/sizes.py",
    "elastic.workers": "decide/facts/sizes.py",
    "elastic.ofWorkers": "decide/facts/sizes.py",
    "readyWorkers": COLUMN,
    "spares": VIEWS,
    "spares.ready": VIEWS,
    "spares.births": "decide/facts/nodes.py",
    "spares.promoted": "model/ownership.py",
    "startTime": "decide/ends.py",
    "completionTime": "decide/ends.py",
    "conditions": VIEWS,
    "observedGeneration": "decide/writes.py",
}
"""The reader of each field: COLUMN, a file of the CLI, or a file of the operator that reads it in the status
that an earlier pass, maybe of another process, has written."""


def fields(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all fields of a schema. The fields of conditions are those of Kubernetes."""
    for name, field in schema.get("properties", {}).items():
        yield prefix + name
        if name != "conditions":
            yield from fields(field.get("items", field), f"{prefix}{name}.")


def version() -> dict[str, Any]:
    found: dict[str, Any] = crd(TrainingJob)["spec"]["versions"][0]
    return found


STATUS = tuple(fields(version()["schema"]["openAPIV3Schema"]["properties"]["status"]))


def columns() -> set[str]:
    paths = (c["jsonPath"] for c in version()["additionalPrinterColumns"])
    return {path.removeprefix(".status.") for path in paths}


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(file.read_text())))


def is_read(field: str, reader: str) -> bool:
    """Return whether the column exists, or the file has the key of the field or loads its attribute."""
    name = field.rpartition(".")[2]
    if reader == COLUMN:
        return any(c == field or c.startswith(f"{field}.") for c in columns())
    if (CLI / reader).exists():
        return any(isinstance(n, ast.Constant) and n.value == name for n in nodes(CLI / reader))
    attribute = re.sub(r"[A-Z]", lambda letter: f"_{letter[0].lower()}", name)
    return any(
        isinstance(n, ast.Attribute) and n.attr == attribute and isinstance(n.ctx, ast.Load)
        for n in nodes(OPERATOR / reader)
    )


def test_each_field_of_the_status_has_a_reader() -> None:
    assert [f for f in STATUS if f not in READERS] == []
    assert [f for f in READERS if f not in STATUS] == []


def test_each_reader_reads_its_field() -> None:
    assert [(f, reader) for f, reader in READERS.items() if not is_read(f, reader)] == []


def test_the_status_stays_small() -> None:
    assert len(STATUS) <= MOST_FIELDS
