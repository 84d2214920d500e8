"""`make soak MINUTES=30`: trainings under random faults on the kind cluster, one after another (C4).

All operator processes get SIGKILL every 30 seconds. Meanwhile ranks, pods, nodes, sidecars, the store and
the control connections fail, by a seed. Each training must end with the bits of an undisturbed one, and with
no violation of I1 to I7 that the oracle of the e2e tests can see. The result is in results/soak.json and .md.
Exit code 1: a violation, or a restart round that no fault explains.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import testbed.faults as faults
from testbed.config import FAULTS, POOLS
from testbed.driver import install
from testbed.driver.jobs import Job, Training, job_manifest, prepare_namespace
from testbed.driver.kube import Kube, is_true
from testbed.driver.oracle import compare_digests, gather, judge
from testbed.shell import BedError

from benchmarks import report
from benchmarks.recovery import jobs as measured
from benchmarks.soak import plan
from holdfast_core.contract import SIDECAR_CONTAINER

NAMESPACE = "holdfast-soak"
OPERATOR_SECONDS = 30.0
TRAINING = Training(workers=3, steps=500, sleep_per_step=0.1, layers=1, width=32)
"""Three workers: a sum of two terms does not depend on their order."""
CALM_STEPS = 60
"""No fault begins in the last steps of a training."""
LONGEST_SECONDS = 420.0
"""Time of one training after which no further fault begins."""
LOGS = Path("build/soak")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    kube = Kube()
    faults.heal_nodes()
    kube.delete_namespace(NAMESPACE)
    kube.wait_namespace_gone(NAMESPACE)
    install.ensure_installed(kube)
    prepare_namespace(kube, NAMESPACE)
    LOGS.mkdir(parents=True, exist_ok=True)
    try:
        calm = _calm(kube)
        killer = OperatorKiller(kube)
        began = time.monotonic()
        outcomes: list[plan.Outcome] = []
        with killer:
            while time.monotonic() - began < 60.0 * options.minutes:
                number = len(outcomes)
                outcome = _train(kube, number, options.seed * 1000 + number, calm)
                outcomes.append(outcome)
                _tell(outcome, killer.kills)
    finally:
        faults.heal_nodes()
        kube.delete_namespace(NAMESPACE)
    found = plan.figures(outcomes, killer.kills, (time.monotonic() - began) / 60.0)
    path = report.write("soak", found)
    path.with_suffix(".md").write_text(f"# Soak\n\n{report.table(found)}\n")
    print(report.table(found))
    return 1 if any(figure.ok is False for figure in found) else 0


def _tell(outcome: plan.Outcome, kills: int) -> None:
    injected = ", ".join(f"{n} {kind}" for kind, n in sorted(outcome.faults.items()))
    print(
        f"training {outcome.number}: {outcome.seconds:.0f} s, {outcome.rounds} rounds after: {injected}. "
        f"Longest recovery {outcome.longest_recovery_seconds:.1f} s. Operators killed so far: {kills}",
        flush=True,
    )
    for problem in outcome.problems:
        print(f"  VIOLATION {problem}", flush=True)


def _calm(kube: Kube) -> dict[int, str]:
    """Return the final digests of a training without faults."""
    training = replace(TRAINING, sleep_per_step=0.0)
    job = Job(kube, NAMESPACE, "calm").start(job_manifest("calm", NAMESPACE, training))
    job.wait_complete()
    found = job.final_digests()
    job.delete()
    return found


class OperatorKiller:
    """Kills all processes of the operator every OPERATOR_SECONDS, as `with OperatorKiller(kube)`."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operator-killer", daemon=True)
        self.kills = 0

    def __enter__(self) -> OperatorKiller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(OPERATOR_SECONDS):
            for pod in self._kube.pods(install.NAMESPACE, "app.kubernetes.io/component=operator"):
                name = pod["metadata"]["name"]
                # A container that ends every 30 s would be restarted later and later. So its pod is
                # replaced, which the Deployment does at once.
                with suppress(BedError):
                    faults.kill_process(install.NAMESPACE, name, "operator")
                    self.kills += 1
                self._kube.delete_pod(install.NAMESPACE, name, grace_seconds=0)


def _train(kube: Kube, number: int, seed: int, calm: dict[int, str]) -> plan.Outcome:
    """Run one training under faults and judge it."""
    name = f"gpt-{number}"
    outcome = plan.Outcome(number)
    began = time.monotonic()
    manifest = job_manifest(name, NAMESPACE, TRAINING)
    manifest["spec"]["failurePolicy"] = {"maxRestarts": 1000, "window": "1h"}
    job = Job(kube, NAMESPACE, name).start(manifest)
    try:
        job.wait_step(5, timeout_seconds=300)
        for fault in plan.faults(seed, TRAINING.workers):
            time.sleep(fault.pause_seconds)
            late = job.live_step() >= TRAINING.steps - CALM_STEPS or is_true(job.read(), "Complete")
            if late or time.monotonic() - began > LONGEST_SECONDS:
                break
            # A pod that is being replaced has no process and perhaps no node.
            with suppress(BedError, KeyError, IndexError):
                INJECTIONS[fault.kind.name](job, fault)
                outcome.faults[fault.kind.name] += 1
                print(f"  {time.monotonic() - began:4.0f} s: {fault.kind.name}", flush=True)
            faults.heal_nodes()
        job.wait_complete(timeout_seconds=600)
        outcome.problems += compare_digests(calm, job.final_digests())
        outcome.problems += judge(gather(job))
    except AssertionError as error:
        outcome.problems.append(f"I6: {str(error).splitlines()[0]} (seed {seed})")
        (LOGS / f"{name}.txt").write_text(f"{error}\n")
    finally:
        faults.heal_nodes()
    status = job.status
    outcome.rounds = int(status.get("restartRound", 0))
    recoveries = status.get("recoveries") or []
    outcome.longest_recovery_seconds = max(
        (r.get("totalSeconds", 0.0) for r in recoveries), default=0
    )
    try:
        job.delete()
    except AssertionError as error:
        outcome.problems.append(f"I7: {error}")
    outcome.seconds = time.monotonic() - began
    return outcome


# ------------------------------------------------------------------ faults

Inject = Callable[[Job, plan.Fault], object]


def _others(fault: plan.Fault, count: int) -> tuple[int, ...]:
    return tuple((fault.worker + n) % TRAINING.workers for n in range(count))


def _partition(job: Job, fault: plan.Fault) -> None:
    node = job.node_of(fault.worker)
    faults.partition_node(node)
    time.sleep(fault.lasts_seconds)
    faults.rejoin_node(node)


def _power_off(job: Job, fault: plan.Fault) -> None:
    faults.kill_node(job.node_of(fault.worker))
    time.sleep(fault.lasts_seconds)


def _store_away(_: Job, fault: plan.Fault) -> None:
    with faults.store_down():
        time.sleep(fault.lasts_seconds)


def _silent(_: Job, fault: plan.Fault) -> None:
    with faults.sidecars_silent(POOLS[FAULTS]):
        time.sleep(fault.lasts_seconds)


INJECTIONS: dict[str, Inject] = {
    "rank killed": lambda job, f: measured.killed_rank(f.worker)(job),
    "pod deleted": lambda job, f: measured.deleted_pods((f.worker,))(job),
    "two pods deleted": lambda job, f: measured.deleted_pods(_others(f, 2))(job),
    "all pods deleted": lambda job, f: measured.deleted_pods(_others(f, TRAINING.workers))(job),
    "out of memory": lambda job, f: measured.out_of_memory(f.worker)(job),
    "sidecar killed": lambda job, f: faults.kill_process(
        job.namespace, job.pod_name(f.worker), SIDECAR_CONTAINER
    ),
    "node powered off": _power_off,
    "node partitioned": _partition,
    "store away": _store_away,
    "control ports silent": _silent,
}


if __name__ == "__main__":
    sys.exit(main())
