"""Which checkpoint is drilled when, and what its status says afterwards."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from tests.support.clock import ManualClock
from tests.support.operator.builders import (
    START,
    UID,
    checkpoint,
    condition,
    manifest_digest,
    raw_job,
    raw_store,
)
from tests.support.operator.fake_api import FakeApi, Raw

from holdfast_core.api import (
    Checkpoint,
    CheckpointCondition,
    CheckpointPhase,
    CheckpointStore,
    DrillStatus,
    RequestedDrill,
    StoreDrills,
    changed,
)
from holdfast_core.clock import stamp
from holdfast_core.contract import DrillContract, DrillExit
from holdfast_core.drill import BadPart, Damage, DrillReport
from holdfast_core.ids import CheckpointId
from holdfast_operator.apply.command_runs import CommandRuns
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.decide.drills import (
    NOTHING_STORED_SECONDS,
    RETRY,
    drill_command,
    drill_result,
    drilled_status,
    ended,
    next_drill,
    next_drill_seconds,
)
from holdfast_operator.kube.api import ApiError
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.loop.stores import Stores
from holdfast_operator.model.command_pods import (
    CommandFailed,
    CommandFailure,
    CommandReport,
    parse_report,
)
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.watch.cache import ClusterCache

NAMESPACE = "team-a"
HOUR = timedelta(hours=1)


def store(verify: dict[str, Any] | None = None, **drills: Any) -> CheckpointStore:
    raw = raw_store("main")
    raw["metadata"].update(uid="s", resourceVersion="1")
    if verify is not None:
        raw["spec"]["verify"] = verify
    found = CheckpointStore.from_dict(raw)
    if not drills:
        return found
    return changed(found, status=changed(found.status, drills=StoreDrills(**drills)))


def stored(step: int, hours: float = 0, drilled: float | None = None, **changes: Any) -> Checkpoint:
    """Return a persisted checkpoint that was saved, and perhaps drilled, this many hours after START."""
    drill = None if drilled is None else DrillStatus(ended_at=START + drilled * HOUR)
    values = {"committed_at": START + hours * HOUR, "store": "main", "drill": drill}
    return checkpoint(step, 0, **{**values, **changes})


def requested(of: Checkpoint, trigger: str = "t", **fields: Any) -> Checkpoint:
    return changed(of, spec=changed(of.spec, verify=RequestedDrill(trigger=trigger, **fields)))


def chosen(of: CheckpointStore, found: list[Checkpoint], hours: float) -> str | None:
    due = next_drill(of, [c for c in found if c.drill_requested], found, START + hours * HOUR)
    return None if due is None else due.checkpoint


# --------------------------------------------------------------------------- which one is next


def test_without_spec_verify_only_requests_are_drilled() -> None:
    found = [stored(10), stored(20, 1)]
    assert chosen(store(), found, 2) is None
    assert next_drill_seconds(store(), START) is None
    asked = [found[0], requested(found[1])]
    due = next_drill(store(), asked[1:], asked, START)
    assert (due.checkpoint, due.uid, due.trigger) == (found[1].name, found[1].uid, "t")


@pytest.mark.fault("The wall clock was wrong when a drill ended, and is set back")
def test_a_stamp_of_the_future_stops_no_drills() -> None:
    later = START + 1000 * HOUR
    begun = store({"every": "24h", "sample": 2}, round_at=later, left=1, again_after=later)
    assert chosen(begun, [stored(10)], 3) is not None
    paused = store({"every": "24h", "sample": 2}, round_at=START, left=1, again_after=later)
    assert chosen(paused, [stored(10)], 3) is not None
    wait = next_drill_seconds(begun, START)
    assert wait <= 24 * 3600


def test_a_fulfilled_request_is_not_drilled_again() -> None:
    done = DrillStatus(ended_at=START, trigger="t")
    assert not requested(stored(10, drill=done)).drill_requested
    assert requested(stored(10, drill=done), "u").drill_requested


def test_a_round_takes_its_sample_and_waits_for_the_next() -> None:
    found = [stored(10), stored(20, 1), stored(30, 2)]
    daily = store({"every": "24h", "sample": 2})
    due = next_drill(daily, [], found, START + 3 * HOUR)
    assert (due.checkpoint, due.left) == (found[2].name, 2)
    one = ended(changed(daily, status=changed(daily.status, drills=due)), True, START + 4 * HOUR)
    assert (one.checkpoint, one.left, one.count) == ("", 1, 1)
    found[2] = stored(30, 2, drilled=4)
    again = changed(daily, status=changed(daily.status, drills=one))
    assert chosen(again, found, 4) == found[0].name
    over = changed(again, status=changed(again.status, drills=changed(one, left=0)))
    assert chosen(over, found, 26) is None
    assert next_drill_seconds(over, START + 26 * HOUR) == 3600
    assert chosen(over, found, 27) is not None


def test_no_checkpoint_is_drilled_twice_in_a_round() -> None:
    found = [stored(10, drilled=3)]
    assert chosen(store({"sample": 5}, round_at=START + 2 * HOUR, left=4), found, 4) is None


@pytest.mark.parametrize("count", [0, 1])
def test_new_ones_and_old_ones_take_turns(count: int) -> None:
    found = [stored(10), stored(20, 1, drilled=9), stored(30, 30)]
    named = chosen(store({}, count=count), found, 40)
    assert named == (found[2] if count == 0 else found[0]).name


def test_every_checkpoint_that_stays_is_drilled_in_time_although_new_ones_come() -> None:
    kept = {c.name: c for c in (stored(n, 0) for n in range(1, 6))}
    daily, drilled = store({"every": "24h"}), set()
    for day in range(1, 13):
        fresh = stored(100 + day, 24 * day)
        now = START + 24 * day * HOUR
        due = next_drill(daily, [], [*kept.values(), fresh], now)
        drilled.add(due.checkpoint)
        if due.checkpoint in kept:
            step = kept[due.checkpoint].spec.step
            assert step is not None
            kept[due.checkpoint] = stored(step, 0, drilled=24 * day)
        named = changed(daily, status=changed(daily.status, drills=due))
        daily = changed(named, status=changed(named.status, drills=ended(named, True, now)))
    assert kept.keys() <= drilled


@pytest.mark.parametrize(
    "changes",
    [
        {"deleting": True},
        {"persisted": False},
        {"phase": CheckpointPhase.DELETING},
    ],
)
def test_what_is_deleted_or_not_stored_is_not_drilled(changes: dict[str, Any]) -> None:
    found = [stored(10, **changes)]
    assert chosen(store({}), found, 4) is None
    assert next_drill_seconds(store({}), START) == NOTHING_STORED_SECONDS


def test_a_store_that_is_down_is_not_drilled() -> None:
    down = store({})
    conditions = (condition("Available", False, "Unreachable"),)
    down = changed(down, status=changed(down.status, conditions=conditions))
    assert chosen(down, [stored(10)], 4) is None


def test_a_drill_without_result_is_repeated_later_in_the_round() -> None:
    daily = store({}, round_at=START, left=1, checkpoint="x", since=START)
    failed = ended(daily, False, START)
    assert (failed.left, failed.again_after) == (1, START + RETRY)
    later = changed(daily, status=changed(daily.status, drills=failed))
    assert chosen(later, [stored(10)], 0.1) is None
    assert next_drill_seconds(later, START) == RETRY.total_seconds()
    assert chosen(later, [stored(10)], 0.2) is not None
    assert ended(daily, None, START).left == 1, "the checkpoint was pruned meanwhile"


# --------------------------------------------------------------------------- what the pod reads


@pytest.mark.parametrize(
    ("verify", "asked", "saved", "ranks"),
    [
        (None, None, 8, None),
        ({"restore": False}, None, 8, None),
        ({"restore": True}, None, 8, 4),
        ({"restore": True}, None, 1, 2),
        ({"restore": True}, None, None, 2),
        ({"restore": True}, {"restore": False}, 8, None),
        (None, {"restore": True}, 8, 4),
        (None, {"restore": True, "world_size": 3}, 8, 3),
    ],
)
def test_number_of_ranks(
    verify: dict[str, Any] | None, asked: dict[str, Any] | None, saved: int, ranks: int | None
) -> None:
    of = stored(10, world_size=saved, job_namespace="elsewhere", bytes=1 << 30)
    if asked is not None:
        of = requested(of, **asked)
    due = StoreDrills(checkpoint=of.name, trigger="t" if asked is not None else "")
    command = drill_command(store(verify), due, of)
    contract = DrillContract.from_json(command.request)
    wanted = DrillContract("elsewhere", UID, 10, 0, manifest_digest(10, 0), ranks)
    assert contract == wanted
    assert command.limit_seconds == 900 + (32 if ranks is None else 96)


# --------------------------------------------------------------------------- what it found


def report(*bad: BadPart, refused: str = "") -> CommandReport:
    found = DrillReport(CheckpointId(10, 0), 1 << 30, 4.0, 2, bad, len(bad), not_restorable=refused)
    state = parse_report(found.to_json(), "the pod")
    assert isinstance(state, CommandReport)
    return state


BAD = BadPart("shard of rank 1", Damage.WRONG_BYTES, "chunk 3: expected crc 1, found 2")


@pytest.mark.parametrize(
    ("state", "verified", "reason", "text"),
    [
        (report(), True, "Intact", "every byte"),
        (report(BAD), False, "Damaged", "shard of rank 1: WrongBytes: chunk 3"),
        (report(BAD, BAD), False, "Damaged", "and 1 more parts"),
        (report(refused="tensor w"), False, "NotRestorable", "tensor w"),
        (
            CommandReport({"error": "UnavailableError", "message": "refused"}),
            None,
            "StoreUnavailable",
            "refused",
        ),
        (CommandReport({"error": "NotFoundError", "message": "no"}), None, "NotRead", "no"),
        (CommandFailed(CommandFailure.FAILED, "no node"), None, "NotRead", "no node"),
        (CommandReport({"badCount": -1, "readBytes": 1, "seconds": 1}), None, "NotRead", "no num"),
        (
            CommandReport({"badCount": True, "readBytes": 1, "seconds": 1}),
            None,
            "NotRead",
            "no num",
        ),
        (CommandReport({"badCount": 1, "readBytes": 1, "seconds": 1}), False, "Damaged", "a part"),
        (CommandReport({}), None, "NotRead", "no num"),
    ],
)
def test_result(
    state: CommandReport | CommandFailed, verified: bool | None, reason: str, text: str
) -> None:
    result = drill_result(state)
    assert (result.verified, result.reason) == (verified, reason)
    assert text in result.message


def after(of: Checkpoint, state: CommandReport | CommandFailed, trigger: str = "") -> Checkpoint:
    due = StoreDrills(checkpoint=of.name, trigger=trigger)
    return changed(of, status=drilled_status(of, drill_result(state), due, 4, START + HOUR))


DOWN = CommandReport({"error": "UnavailableError", "message": "refused"})


def test_status_after_a_drill() -> None:
    found = after(stored(10), report(), "t")
    assert found.status.is_true(CheckpointCondition.VERIFIED)
    assert found.status.verified_at == START + HOUR
    assert found.status.drill == DrillStatus(
        ended_at=START + HOUR,
        trigger="t",
        bytes=1 << 30,
        seconds=4.0,
        gib_per_second=0.25,
        world_size=4,
    )
    assert found.status.condition(CheckpointCondition.QUARANTINED) is None
    assert not found.damaged


def test_damage_quarantines_until_a_later_drill_finds_none() -> None:
    bad = after(stored(10), report(BAD))
    mark = bad.status.condition(CheckpointCondition.QUARANTINED)
    assert (mark.is_true, mark.reason, bad.damaged) == (True, "Damaged", True)
    assert "shard of rank 1" in mark.message
    unknown = after(bad, DOWN, "t")
    assert unknown.damaged, "a store that is down repairs nothing"
    assert unknown.status.verified_at == bad.status.verified_at
    assert unknown.status.drill.trigger == "t"
    repaired = after(unknown, report())
    mark = repaired.status.condition(CheckpointCondition.QUARANTINED)
    assert (mark.is_true, mark.reason, repaired.damaged) == (False, "Released", False)
    assert repaired.status.drill.trigger == "t"


def test_a_store_that_is_down_makes_a_verified_checkpoint_unknown() -> None:
    unknown = after(after(stored(10), report()), DOWN)
    found = unknown.status.condition(CheckpointCondition.VERIFIED)
    assert (found.status, found.reason) == ("Unknown", "StoreUnavailable")
    assert unknown.status.verified_at == START + HOUR


def test_quarantine_for_failures_stays_whatever_a_drill_finds() -> None:
    marked = stored(10)
    mark = condition(CheckpointCondition.QUARANTINED, True, "Quarantined")
    conditions = (*marked.status.conditions, mark)
    marked = changed(marked, status=changed(marked.status, conditions=conditions))
    for state in (report(BAD), report()):
        marked = after(marked, state)
        assert marked.status.condition(CheckpointCondition.QUARANTINED) == mark


# --------------------------------------------------------------------------- with the API


class Place:
    """A store with Checkpoints in an in-memory API, and the passes over it."""

    def __init__(self, *found: Checkpoint, verify: dict[str, Any] | None = None) -> None:
        self.api, self.clock = FakeApi(), ManualClock()
        self.api.put("trainingjobs", raw_job())
        raw = raw_store("main")
        if verify is not None:
            raw["spec"]["verify"] = verify
        self.store = self.api.put("checkpointstores", raw)
        self.checkpoints = [self.api.put("checkpoints", c.to_dict()) for c in found]
        cluster = Cluster(self.api)
        self.keys: list[Any] = []
        self.cache = ClusterCache(self.api, self.clock, (), self.keys.append, lambda job: None)
        events = Events(cluster, self.clock)
        commands = CommandRuns(cluster, self.cache, SidecarSettings("i"), self.clock)
        self.metrics = Metrics()
        self.stores = Stores(cluster, self.cache, events, commands, self.metrics, self.clock)

    async def passes(self, number: int = 4) -> float | None:
        again = None
        for _ in range(number):
            for reflector in self.cache.reflectors:
                await reflector.relist()
            again = await self.stores.reconcile(NAMESPACE, "main")
        return again

    def pods(self) -> list[Raw]:
        """Return the pods that probe or drill. A store is listed at the same time (test_usages.py)."""
        return [
            pod
            for pod in self.api.all("pods")
            if "deletionTimestamp" not in pod["metadata"]
            and pod["metadata"]["labels"]["app.kubernetes.io/component"] != "store-usage"
        ]

    def end(self, state: CommandReport) -> None:
        (pod,) = self.pods()
        ending = {"state": {"terminated": {"message": json.dumps(dict(state.data))}}}
        pod["status"] = {"phase": "Succeeded", "containerStatuses": [ending]}

    def verified(self, index: int = 0) -> tuple[str, str]:
        conditions = self.checkpoints[index]["status"]["conditions"]
        (found,) = [c for c in conditions if c["type"] == "Verified"]
        return found["status"], found["reason"]

    def available(self) -> tuple[str, str]:
        (found,) = [c for c in self.store["status"]["conditions"] if c["type"] == "Available"]
        return found["status"], found["reason"]

    def events(self) -> list[tuple[str, str, str]]:
        all_ = self.api.all("events")
        return [(e["involvedObject"]["kind"], e["reason"], e["message"]) for e in all_]

    def drilled(self, result: str) -> float | None:
        labels = {"namespace": NAMESPACE, "store": "main", "result": result}
        return self.metrics.registry.get_sample_value("holdfast_drills_total", labels)


async def test_a_round_from_its_begin_to_its_result() -> None:
    place = Place(stored(10), verify={"restore": True})
    await place.passes()
    (pod,) = place.pods()
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "store-drill"
    assert place.store["status"]["drills"]["checkpoint"] == place.checkpoints[0]["metadata"]["name"]
    await place.passes()
    assert place.pods() == [pod], "one pod at a time"
    place.end(report())
    await place.passes(1)
    assert place.verified() == ("True", "Intact")
    assert place.store["status"]["drills"]["count"] == 1
    assert place.drilled("intact") == 1
    await place.passes()
    assert place.pods() == []
    store = place.cache.stores.get(NAMESPACE, "main")
    assert store is not None
    assert next_drill_seconds(store, place.clock.utc_now()) == 24 * 3600
    assert [(kind, reason) for kind, reason, _ in place.events()] == [("Checkpoint", "Intact")]


FULL = ApiError(403, "Forbidden", "pods is forbidden: exceeded quota: team, used: pods=8")
WEBHOOK = ApiError(500, "InternalError", "Internal error occurred: failed calling webhook pods")


@pytest.mark.fault("The quota of a namespace has no room for the pods of its store")
async def test_a_drill_whose_pod_does_not_fit_ends_and_says_why() -> None:
    """`kubectl holdfast verify` waits for its end."""
    place = Place(requested(stored(10)))
    place.api.refuse["POST", "pods"] = FULL
    await place.passes()
    assert place.verified() == ("Unknown", "NotRead")
    assert any("exceeded quota: team" in text for _, _, text in place.events())
    assert place.available() == ("True", "Probed"), "the store is as good as before"


@pytest.mark.fault("A webhook of the cluster fails for the pods of a store")
@pytest.mark.parametrize("error", [FULL, WEBHOOK], ids=["quota", "webhook"])
async def test_a_new_store_says_that_its_probe_is_refused(error: ApiError) -> None:
    place = Place()
    del place.store["status"]
    place.api.refuse["POST", "pods"] = error
    await place.passes()
    assert place.available() == ("False", "ProbeRefused")
    assert str(error) in place.store["status"]["conditions"][0]["message"]


async def test_an_api_server_that_does_not_answer_says_nothing_about_a_new_store() -> None:
    place = Place()
    del place.store["status"]
    place.api.refuse["POST", "pods"] = ApiError(503, "ServiceUnavailable", "starting")
    with pytest.raises(ApiError):
        await place.passes()
    assert "status" not in place.store


async def test_a_probe_that_does_not_fit_says_nothing_about_a_store_that_was_available() -> None:
    place = Place(requested(stored(10)))
    tier = {"storeRef": {"name": "main"}, "every": {"steps": 10}}
    place.api.put("trainingjobs", raw_job(checkpoint={"interval": {"steps": 5}, "object": tier}))
    place.store["status"]["lastProbe"] = "1970-01-01T00:00:00Z"  # the job is younger
    place.api.refuse["POST", "pods"] = FULL
    again = await place.passes()
    assert place.available() == ("True", "Probed")
    assert place.verified() == ("Unknown", "NotRead"), "a drill that is asked for is answered"
    assert again is not None and again > 30, "the job may not begin for days"
    place.api.refuse.clear()
    await place.passes(2)
    (pod,) = place.pods()
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "store-probe"


@pytest.mark.fault("A drill finds damage in the object store")
async def test_damage_is_reported_on_checkpoint_and_job_with_the_one_to_restore_instead() -> None:
    place = Place(requested(stored(20, 1)), stored(10))
    await place.passes()
    place.end(report(BAD))
    await place.passes(1)
    assert place.verified() == ("False", "Damaged")
    events = place.events()
    assert [(kind, reason) for kind, reason, _ in events] == [
        ("Checkpoint", "Damaged"),
        ("TrainingJob", "Damaged"),
    ]
    for _, _, message in events:
        assert "shard of rank 1" in message
        assert "the job would restore step 10 of round 0" in message
    assert place.drilled("damaged") == 1


@pytest.mark.fault("A job is gone whose stored checkpoint is damaged")
async def test_the_checkpoint_of_a_job_that_is_gone_is_quarantined() -> None:
    place = Place(requested(stored(20)))
    place.api.remove("trainingjobs", NAMESPACE, "job")
    await place.passes()
    place.end(report(BAD))
    await place.passes(1)
    conditions = place.checkpoints[0]["status"]["conditions"]
    marks = [(c["status"], c["reason"]) for c in conditions if c["type"] == "Quarantined"]
    assert marks == [("True", "Damaged")]
    ((kind, _, message),) = place.events()
    assert (kind, "no other checkpoint is left" in message) == ("Checkpoint", True)


@pytest.mark.fault("A checkpoint is deleted while it is drilled")
@pytest.mark.parametrize("how", ["gone", "deleted", "pruned", "another one of its name"])
async def test_the_drill_of_a_checkpoint_that_is_deleted_ends_quietly(how: str) -> None:
    place = Place(requested(stored(20)), stored(10))
    await place.passes()
    raw = place.checkpoints[0]
    place.end(report(BAD))
    match how:
        case "gone":
            place.api.remove("checkpoints", NAMESPACE, raw["metadata"]["name"])
        case "deleted":
            raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        case "pruned":
            raw["status"]["phase"] = "Deleting"
        case _:
            raw["metadata"]["uid"] = "another"
            raw["spec"].pop("verify")
    await place.passes(1)
    assert place.store["status"]["drills"]["checkpoint"] == ""
    assert place.pods() == []
    assert place.events() == []
    assert "verifiedAt" not in raw["status"]


@pytest.mark.fault("A drill is requested of a checkpoint that retention prunes")
async def test_a_request_for_what_is_being_pruned_holds_up_nothing() -> None:
    place = Place(requested(stored(20), "a"), requested(stored(10), "b"))
    place.checkpoints[0]["status"]["phase"] = "Deleting"
    await place.passes(10)
    assert place.store["status"]["drills"]["checkpoint"] == place.checkpoints[1]["metadata"]["name"]
    place.end(report())
    await place.passes(10)
    assert place.verified(1) == ("True", "Intact")
    assert place.store["status"]["drills"]["count"] == 1, "the status is written no more"


@pytest.mark.fault("The object store is down when a checkpoint is to be drilled")
async def test_a_request_to_a_store_that_is_down_is_answered_at_once() -> None:
    place = Place(requested(stored(20)))
    (known,) = place.store["status"]["conditions"]
    known.update(status="False", reason="Unreachable", message="connection refused")
    place.store["status"]["lastProbe"] = stamp(place.clock.utc_now())
    await place.passes()
    assert place.verified() == ("Unknown", "StoreUnavailable")
    assert place.pods() == []
    assert place.drilled("not_read") == 1


async def test_a_deleted_store_has_no_drill() -> None:
    place = Place(requested(stored(20)))
    await place.passes()
    assert place.pods() != []
    place.store["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    await place.passes()
    assert place.pods() == []


@pytest.mark.fault("The operator dies between the writes after a drill")
async def test_a_result_that_was_written_half_is_written_again() -> None:
    place = Place(requested(stored(20)))
    await place.passes()
    place.end(report())
    before = dict(place.store["status"]["drills"])
    await place.passes(1)
    place.store["status"]["drills"] = before
    for pod in place.api.all("pods"):
        pod["metadata"].pop("deletionTimestamp", None)
    await place.passes(1)
    assert place.verified() == ("True", "Intact")
    assert place.store["status"]["drills"]["count"] == 1


@pytest.mark.fault("The operator dies before it removes the pod of a drill that has ended")
async def test_the_pod_of_a_drill_whose_result_was_written_is_removed() -> None:
    place = Place(requested(stored(20)))
    await place.passes()
    place.end(report())
    (pod,) = place.pods()
    await place.passes(1)
    del pod["metadata"]["deletionTimestamp"]
    await place.passes(1)
    assert place.pods() == []


@pytest.mark.fault("A store's place is corrected while a checkpoint is drilled in the wrong one")
async def test_what_a_drill_finds_in_another_place_says_nothing() -> None:
    place = Place(requested(stored(20)))
    await place.passes()
    place.end(report(BAD))
    (wrong,) = place.pods()
    place.store["spec"]["s3"]["prefix"] = "corrected"
    await place.passes(2)
    (right,) = place.pods()
    assert right["metadata"]["name"] != wrong["metadata"]["name"]
    assert place.store["status"]["drills"]["count"] == 0
    assert "Verified" not in {c["type"] for c in place.checkpoints[0]["status"]["conditions"]}


async def test_a_store_that_is_down_is_not_looked_at_all_the_time() -> None:
    place = Place()
    (known,) = place.store["status"]["conditions"]
    known.update(status="False", reason="Unreachable", message="connection refused")
    known["lastTransitionTime"] = "1970-01-01T00:00:00Z"
    place.store["status"]["lastProbe"] = stamp(place.clock.utc_now())
    assert await place.passes() == 120.0, "its listing is due, and waits for the next probe"


@pytest.mark.parametrize("how", ["deleted", "unreadable"])
async def test_the_series_of_a_store_last_as_long_as_the_store(how: str) -> None:
    place = Place()
    usage = {"bytes": 7, "objects": 1, "checkpoints": 0, "listedAt": "2026-01-01T00:00:00Z"}
    place.store["status"]["usage"] = {**usage, "location": "https://minio.example:9000/b"}
    place.store["status"]["lastListing"] = stamp(place.clock.utc_now())
    await place.passes()

    def shown() -> float | None:
        labels = {"namespace": NAMESPACE, "store": "main"}
        return place.metrics.registry.get_sample_value("holdfast_store_bytes", labels)

    assert shown() == 7
    place.metrics.drilled(NAMESPACE, "main", DrillExit.INTACT, 1, 1.0)
    if how == "deleted":
        place.api.remove("checkpointstores", NAMESPACE, "main")
    else:
        place.store["spec"] = {}
    await place.passes()
    is_there = how == "unreadable"
    assert (shown() == 7) is is_there
    assert (place.drilled("intact") == 1) is is_there


async def test_the_results_of_a_drill_and_a_listing_are_one_write_of_the_status() -> None:
    place = Place(requested(stored(20)))
    await place.passes()
    reports = {"store-drill": dict(report().data), "store-usage": {"error": "E", "message": "m"}}
    for pod in place.api.all("pods"):
        message = json.dumps(reports[pod["metadata"]["labels"]["app.kubernetes.io/component"]])
        ending = {"state": {"terminated": {"message": message}}}
        pod["status"] = {"phase": "Succeeded", "containerStatuses": [ending]}
    before = len(place.api.requests)
    await place.passes(1)
    writes = [r for r in place.api.requests[before:] if r[0] == "PATCH" and "stores" in r[1]]
    assert len(writes) == 1
    status = place.store["status"]
    assert status["drills"]["count"] == 1
    assert "lastListing" in status
