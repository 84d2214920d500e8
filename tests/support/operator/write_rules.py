"""Rules that the operator's writes to the API server must keep, whatever fails (docs/guarantees.md).

They are stated over what an ApiProxy recorded, without the code under test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.support.operator.api_proxy import Write

from holdfast_core.ids import JobUid
from holdfast_core.names import parse_pod_name


def broken_rules(writes: Sequence[Write]) -> list[str]:
    """Return a sentence for each rule that the writes that the API server accepted break."""
    accepted = [w for w in writes if w.status < 300]
    return [*_statuses(accepted), *_deletions(accepted), *_creations(accepted)]


def _statuses(accepted: Iterable[Write]) -> list[str]:
    """Check that rounds and commits never go back, and that each round has one restore point."""
    found: list[str] = []
    objects = [
        w.reply for w in accepted if w.call.plural == "trainingjobs" and w.call.part == "status"
    ]
    highest: dict[str, int] = {}
    points: dict[tuple[str, int], Any] = {}
    persisted: dict[str, tuple[int, int]] = {}
    for raw in sorted(objects, key=_version):
        uid, status = raw["metadata"]["uid"], raw["status"]
        round_ = status.get("restartRound")
        if round_ is None:
            continue
        if round_ < highest.get(uid, -1):
            found.append(f"the round went back from {highest[uid]} to {round_}")
        highest[uid] = max(round_, highest.get(uid, -1))
        point = _point(status.get("restorePoint"))
        if point is not None and points.setdefault((uid, round_), point) != point:
            found.append(f"round {round_} changed its restore point to {point}")
        last = _point(status.get("lastPersisted"))
        if last is not None and last < persisted.get(uid, last):
            found.append(f"lastPersisted went back from {persisted[uid]} to {last}")
        if last is not None:
            persisted[uid] = max(last, persisted.get(uid, last))
    return found


def _deletions(accepted: Iterable[Write]) -> list[str]:
    """Check that no member's pod and no checkpoint is deleted, and that each delete of a pod names a uid."""
    found: list[str] = []
    newest: dict[tuple[str, JobUid], tuple[int, list[int]]] = {}
    """Version and members in the newest status of each job."""
    for write in accepted:
        call, raw = write.call, write.reply
        if call.plural == "trainingjobs" and call.part == "status":
            key = (raw["metadata"]["name"], JobUid(raw["metadata"]["uid"]))
            status = (_version(raw), raw["status"].get("members", []))
            newest[key] = max(status, newest.get(key, status))  # two operators may write
        if call.verb != "delete":
            continue
        if call.plural == "checkpoints":
            found.append(f"Checkpoint {call.name} was deleted")
        if call.plural == "pods":
            if "uid" not in (write.body.get("preconditions") or {}):
                found.append(f"pod {call.name} was deleted whatever its uid")
            for (job, uid), (_, births) in newest.items():
                pod = parse_pod_name(job, uid, call.name)
                if pod is not None and births[pod[0]] == pod[1]:
                    found.append(f"pod {call.name} was deleted while it was a member")
    return found


def _creations(accepted: Iterable[Write]) -> list[str]:
    """Check that each pod is created once."""
    names = Counter(
        w.reply["metadata"]["name"]
        for w in accepted
        if w.call.verb == "post" and w.call.plural == "pods" and not w.call.dry_run
    )
    made = [name for name, count in names.items() if count > 1]
    return [f"pod {name} was created more than once" for name in made]


def _point(raw: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if not raw or raw.get("step") is None:
        return None
    return raw["step"], raw["round"]


def _version(raw: Mapping[str, Any]) -> int:
    return int(raw["metadata"]["resourceVersion"])
