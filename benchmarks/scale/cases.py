"""The cases of the benchmark, in the order in which they run on one bed.

Each returns rows of figures. A case that does not find the bed as the one before has left it raises
TimeoutError.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from typing import Any, Self

from benchmarks.report import Figure, at_most, for_orientation
from benchmarks.scale.bed import NAMESPACE, Bed
from benchmarks.scale.kubelets import Pod, in_parallel
from benchmarks.scale.operator_process import OperatorProcess
from holdfast_core.ids import Worker

FAILURES_PER_SECOND = 100.0
_SETTLE_SECONDS = 30.0
_NOW = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}


_PASSES = "holdfast_reconcile_seconds_count"


class Usage:
    """What an operator uses from now on."""

    def __init__(self, operator: OperatorProcess, bed: Bed, passes: float) -> None:
        self.operator = operator
        self.bed = bed
        self.begun = time.monotonic()
        self._cpu = operator.cpu_seconds()
        self._passes = passes
        self._handshakes = bed.kubelets.listener.handshakes
        bed.forget_calls()

    @classmethod
    async def begin(cls, operator: OperatorProcess, bed: Bed) -> Self:
        return cls(operator, bed, await operator.metric(_PASSES))

    async def taken(self) -> dict[str, Any]:
        seconds = time.monotonic() - self.begun
        cpu = self.operator.cpu_seconds() - self._cpu
        memory, peak = self.operator.memory_mib()
        return {
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu, 1),
            "cores": round(cpu / seconds, 3),
            "memory_mib": round(memory),
            "peak_mib": round(peak),
            "passes": await self.operator.metric(_PASSES) - self._passes,
            "handshakes": self.bed.kubelets.listener.handshakes - self._handshakes,
            "calls": dict(self.bed.calls),
        }


async def create(bed: Bed, operator: OperatorProcess) -> list[Figure]:
    """Create all jobs, and wait until all gangs train."""
    usage = await Usage.begin(operator, bed)
    await bed.create_jobs()
    await bed.until("all gangs train", lambda: _all_train(bed, 0), 1800, 5)
    taken = await usage.taken()
    what = "all jobs are created at once -> all gangs train; the API server uses a core of two"
    return [for_orientation("creation", [taken["seconds"]], "s", what=what, **taken)]


async def steady(bed: Bed, operator: OperatorProcess, seconds: float) -> list[Figure]:
    """Measure the operator while all gangs train and nothing fails."""
    await asyncio.sleep(_SETTLE_SECONDS)
    usage = await Usage.begin(operator, bed)
    await asyncio.sleep(seconds)
    taken = await usage.taken()
    return [
        at_most(
            "C1-idle", [taken["cores"]], "cores", 0.3, what="all gangs train undisturbed", **taken
        )
    ]


async def cold_start(bed: Bed, operator: OperatorProcess, seconds: float) -> list[Figure]:
    """Kill the operator, and start it again while all gangs train."""
    operator.kill()
    before = await bed.statuses()
    bed.forget_calls()
    operator.start()
    begun = time.monotonic()
    polled_at: list[float] = []

    async def reconciled() -> bool:
        polled = len(bed.called.get("/v1/state", {}))
        if polled < bed.jobs:  # its metrics would cost the starting operator time
            _progress(f"{polled} of {bed.jobs} coordinators called")
            return False
        passes = await operator.metric(_PASSES)
        waiting = await operator.metric("holdfast_queue_depth")
        _progress(f"{passes:.0f} passes, {waiting:.0f} jobs in the queue")
        polled_at.append(time.monotonic())
        # The last answer has been acted on if the queue is still empty a second after it.
        waited = polled_at[-1] - polled_at[0] >= 1.0
        return passes >= 2 * bed.jobs and waited and waiting == 0

    await bed.until("the operator has reconciled all jobs", reconciled, 900, 1)
    wall = time.monotonic() - begun
    cpu = operator.cpu_seconds()
    calls, passes = dict(bed.calls), await operator.metric(_PASSES)
    await _read_all(bed)
    knows_all = time.monotonic() - begun
    await asyncio.sleep(_SETTLE_SECONDS)
    usage = await Usage.begin(operator, bed)
    await asyncio.sleep(seconds)
    taken = await usage.taken()
    after = await bed.statuses()
    restarted = sum(after[u]["restartRound"] != s["restartRound"] for u, s in before.items())
    what = (
        "operator started -> every coordinator has answered, all jobs have had their passes, and the "
        "queue is empty"
    )
    inventories = (
        "operator started -> it has the inventory of every sidecar, which it reads in turn"
    )
    return [
        at_most("C1", [wall], "s", 60, what=what, cpu_seconds=cpu, passes=passes, calls=calls),
        for_orientation("C1-inventories", [knows_all], "s", what=inventories),
        at_most("C1-memory", [taken["peak_mib"]], "MiB", 400, what="peak after a cold start"),
        at_most("C1-restarts", [restarted], "gangs", 0, what="gangs that the start restarted"),
    ]


async def failures(bed: Bed, operator: OperatorProcess) -> list[Figure]:
    """Delete one pod of each gang, FAILURES_PER_SECOND of them in a second."""
    rounds = await _rounds(bed)
    usage = await Usage.begin(operator, bed)
    lost = await _lose(bed, list(rounds), FAILURES_PER_SECOND)
    await bed.until("all gangs train again", lambda: _recovered(bed, rounds), 1800, 5)
    taken = await usage.taken()
    sealed = bed.called["/v1/seal"]
    first = {
        uid: min(sealed[s.pod] for s in bed.kubelets.gangs[uid].members.values() if s.pod in sealed)
        for uid in lost
    }
    delays = sorted(first[uid] - at for uid, at in lost.items())
    taken["median_seconds"] = round(statistics.median(delays), 2)
    taken["failures"] = len(delays)
    what = f"pod deleted -> first SEAL of its gang, 99th percentile at {FAILURES_PER_SECOND:.0f}/s"
    found = [
        at_most("C2-p99", [delays[int(len(delays) * 0.99)]], "s", 2, what=what, **taken),
        *await _counted(bed, rounds, "C2-p99"),
    ]
    return found if bed.jobs > 1 else [*found, *_of_one_gang(taken)]


def _of_one_gang(taken: dict[str, Any]) -> list[Figure]:
    """Return what the recovery of a single gang cost the operator. The targets are those of 4,096 workers."""
    cpu, memory = taken["cpu_seconds"], taken["peak_mib"]
    text = "pod deleted -> the gang trains: processor time of the operator"
    return [
        at_most("gang-cpu", [cpu], "s", 30, what=text),
        at_most("gang-memory", [memory], "MiB", 600, what="peak memory of the operator"),
        for_orientation("gang-recovery", [taken["seconds"]], "s", what="pod deleted -> it trains"),
    ]


async def catastrophe(bed: Bed, operator: OperatorProcess) -> list[Figure]:
    """Delete all pods at once. No kubelet works until all replacements exist."""
    rounds = await _rounds(bed)
    pods = bed.jobs * bed.workers
    usage = await Usage.begin(operator, bed)
    old = set(bed.kubelets.pods)
    bed.kubelets.works.clear()
    deletion = asyncio.create_task(bed.delete_pods(_NOW))

    def replaced() -> bool:
        if deletion.done():
            deletion.result()  # what has ended it would otherwise show after half an hour
        return sum(not p.deleting for u, p in bed.kubelets.pods.items() if u not in old) >= pods

    try:
        await bed.until("all pods are replaced", replaced, 1800)
    finally:
        bed.kubelets.works.set()
    taken = await usage.taken()
    await deletion
    await bed.until("all gangs train again", lambda: _recovered(bed, rounds), 1800, 5)
    taken["all_train_seconds"] = round(time.monotonic() - usage.begun, 1)
    what = "all pods deleted at once -> all replacements are created"
    return [
        at_most("C2", [taken["seconds"]], "s", 60, what=what, **taken),
        *await _counted(bed, rounds, "C2"),
    ]


async def two_operators(bed: Bed, operator: OperatorProcess) -> list[Figure]:
    """Let a second operator lead as well, by a lease of its own, while each gang loses a pod."""
    second = bed.operator("second")
    bed.forget_calls()
    second.start()
    await bed.until("the second leads", lambda: second.metric("holdfast_operator_leads"), 300)
    await _read_all(bed)
    rounds = await _rounds(bed)
    usage = await Usage.begin(operator, bed)
    await _lose(bed, list(rounds), 10.0)
    await bed.until("all gangs train again", lambda: _recovered(bed, rounds), 1800, 5)
    taken = await usage.taken()
    second.kill()
    doubles = await _counted(bed, rounds, "C5")
    what = f"{bed.jobs} pods lost at 10/s -> all gangs train, two operators that both lead"
    return [for_orientation("two operators", [taken["seconds"]], "s", what=what, **taken), *doubles]


async def outage(bed: Bed, operator: OperatorProcess, seconds: float) -> list[Figure]:
    """Take the API server away in four ways, one after the other, and lose pods meanwhile."""
    plane, account, pid = bed.plane, bed.account, operator.pid
    rounds = await _rounds(bed)
    chosen = list(rounds)[: max(1, bed.jobs // 50)]
    lost = [p for p in bed.kubelets.pods.values() if p.job in chosen and p.worker == 1]
    bed.forget_calls()
    for begin, end in (
        (lambda: account.may_nothing(NAMESPACE), lambda: account.may_again(NAMESPACE)),
        (plane.freeze_etcd, plane.thaw_etcd),
        (plane.freeze_api, plane.thaw_api),
        (plane.kill_api, plane.start_api),
    ):
        await asyncio.to_thread(begin)
        await asyncio.sleep(seconds / 4)
        if begin == plane.kill_api:
            for pod in lost:
                bed.kubelets.lose_sidecar(pod)
        await asyncio.to_thread(end)
    begun = time.monotonic()
    polls = bed.calls["/v1/state"]
    for pod in lost:
        await bed.api.delete(pod.path, _NOW)
    await bed.until("the gangs train again", lambda: _recovered(bed, rounds, chosen), 1800, 1)
    wall = time.monotonic() - begun
    others = {u: r for u, r in rounds.items() if u not in chosen}
    what = (
        f"API server away for {seconds:.0f} s (403, errors, silent, refused) -> "
        f"the gangs of {len(lost)} pods that were lost meanwhile train"
    )
    same = operator.is_running() and operator.pid == pid
    return [
        at_most("C3", [wall], "s", 30, what=what, polls=polls, phases=await _phases(bed, chosen)),
        at_most(
            "C3-process", [0 if same else 1], "restarts", 0, what="operator processes that ended"
        ),
        *await _counted(bed, {u: rounds[u] for u in chosen}, "C3"),
        *await _untouched(bed, others, "C3"),
    ]


async def returning_nodes(bed: Bed, operator: OperatorProcess, drills: int) -> list[Figure]:
    """Cut nodes off until their pods are replaced. Then they return, and report commits of their rounds."""
    rounds = await _rounds(bed)
    nodes = sorted({p.node for p in bed.kubelets.pods.values()})[: -(-drills // 8)]
    cut = [p for p in bed.kubelets.pods.values() if p.node in nodes]
    chosen = sorted({p.job for p in cut})
    old = {(p.job, p.worker): bed.kubelets.gangs[p.job].members[Worker(p.worker)] for p in cut}
    begun = time.monotonic()
    bed.kubelets.cut_off_nodes(nodes)
    await bed.until("the gangs train again", lambda: _recovered(bed, rounds, chosen), 1800, 2)
    wall = time.monotonic() - begun
    for (job, worker), sidecar in old.items():
        bed.kubelets.gangs[job].claim(sidecar, 10**6 + worker)
    members = [s for job in chosen for s in bed.kubelets.gangs[job].members.values()]
    before = {id(s): len(s.rounds) for s in members}
    bed.kubelets.rejoin_nodes()
    gone = {p.uid for p in cut}
    await bed.until("the old pods end", lambda: not gone & set(bed.kubelets.pods), 600)
    await asyncio.sleep(_SETTLE_SECONDS)
    statuses = await bed.statuses()
    stale = sum(
        (s.get("lastCommittedStep") or 0) >= 10**6
        or ((s.get("lastPersisted") or {}).get("step") or 0) >= 10**6
        or (s["restorePoint"].get("step") or 0) >= 10**6
        for s in statuses.values()
    )
    pods = {p.ranks_name for p in cut}
    read = sum(
        m.pod in pods
        for gang in (bed.kubelets.gangs[u] for u in chosen)
        for s in gang.members.values()
        for message in s.rounds[before.get(id(s), 0) :]
        for m in message.members
    )
    others = {u: r for u, r in rounds.items() if u not in chosen}
    what = f"{len(nodes)} nodes cut off -> their {len(cut)} pods are replaced, all gangs train"
    return [
        for_orientation("nodes cut off", [wall], "s", what=what, gangs=len(chosen)),
        at_most("C6-commits", [stale], "gangs", 0, what="commits of returned pods that count"),
        at_most(
            "C6-reads",
            [read],
            "messages",
            0,
            what="ROUNDs after the return that name a returned pod",
        ),
        *await _untouched(bed, others, "C6"),
    ]


# ---------------------------------------------------------------------- parts


async def _read_all(bed: Bed) -> None:
    """Wait until a new operator process has the inventory of each sidecar, since `forget_calls`."""
    sidecars = bed.jobs * bed.workers

    def known() -> bool:
        # The reply to ROUND is an inventory as well.
        paths = ("/v1/inventory", "/v1/round")
        found = len({pod for path in paths for pod in bed.called.get(path, {})})
        _progress(f"the operator has called {found} of {sidecars} sidecars")
        return found >= sidecars

    await bed.until("the operator knows all sidecars", known, 900, 1)


def _progress(text: str) -> None:
    print(f"    {text}", flush=True)


async def _untouched(bed: Bed, rounds: dict[str, int], case: str) -> list[Figure]:
    now = await _rounds(bed)
    what = "gangs that lost nothing and restarted"
    restarted = sum(now[u] != r for u, r in rounds.items())
    return [at_most(f"{case}-others", [restarted], "gangs", 0, what=what)]


async def _all_train(bed: Bed, round_: int) -> bool:
    trained = await bed.trained(lambda _: round_)
    _progress(f"{trained} of {bed.jobs} gangs train, {len(bed.kubelets.pods)} pods")
    return trained == bed.jobs


async def _rounds(bed: Bed) -> dict[str, int]:
    return {uid: s["restartRound"] for uid, s in (await bed.statuses()).items()}


async def _phases(bed: Bed, gangs: list[str]) -> dict[str, float]:
    """Return the longest time of each phase in the newest recoveries of these gangs, in seconds."""
    longest: dict[str, float] = {}
    for uid, status in (await bed.statuses()).items():
        for name, value in status["recoveries"][-1]["phaseSeconds"].items() if uid in gangs else ():
            longest[name] = max(longest.get(name, 0.0), value)
    return longest


async def _recovered(bed: Bed, rounds: dict[str, int], chosen: list[str] | None = None) -> bool:
    """Return whether the chosen gangs, or all, train in a later round than they did, and the others train."""
    wanted = len(rounds if chosen is None else chosen)
    trained = await bed.trained(lambda uid: rounds[uid] + 1, chosen)
    _progress(f"{trained} of {wanted} gangs train again")
    if trained < wanted:
        return False
    return chosen is None or await bed.trained(lambda uid: rounds[uid]) == bed.jobs


async def _lose(bed: Bed, gangs: list[str], per_second: float) -> dict[str, float]:
    """Delete one pod of each of these gangs, each at its time. Return when, by the job's uid."""
    pods: dict[str, list[Pod]] = {}
    for pod in bed.kubelets.pods.values():
        pods.setdefault(pod.job, []).append(pod)
    begun, lost = time.monotonic(), dict[str, float]()

    async def lose(numbered: tuple[int, str]) -> None:
        number, uid = numbered
        await asyncio.sleep(max(0.0, begun + number / per_second - time.monotonic()))
        lost[uid] = await bed.delete_pod(pods[uid][number % len(pods[uid])], _NOW)

    await in_parallel(lose, enumerate(gangs), 64)
    return lost


async def _counted(bed: Bed, rounds: dict[str, int], case: str) -> list[Figure]:
    """Return how many rounds and pods the recoveries of these gangs cost beyond one each."""
    statuses = await bed.statuses()
    begun = {uid: statuses[uid]["restartRound"] - round_ for uid, round_ in rounds.items()}
    living = Counter((p.job, p.worker) for p in bed.kubelets.pods.values() if not p.deleting)
    doubles = sum(n > 1 for n in living.values())
    return [
        at_most(
            f"{case}-rounds",
            [sum(n - 1 for n in begun.values())],
            "rounds",
            0,
            what="rounds beyond one for each loss",
            gangs=dict(Counter(str(n) for n in begun.values())),
        ),
        at_most(
            f"{case}-pods",
            [doubles],
            "workers",
            0,
            what="workers with two living pods",
        ),
    ]
