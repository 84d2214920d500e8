"""`make bench-recovery`: B1-B4, B6 and B7 on the test bed's cluster, and what people have today.

Each repetition is appended to build/bench/recovery.jsonl, and results/recovery.json, .md and .png are written
again from it. An interrupted run continues where it ended; --fresh begins again. At the end and after SIGINT
or SIGTERM all nodes run, and the benchmark's namespace is gone.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

import testbed.faults as faults
from testbed.config import current_bed
from testbed.driver import install
from testbed.driver.jobs import prepare_namespace
from testbed.driver.kube import Kube
from testbed.images import image_label

from benchmarks.recovery import chart, jobs
from benchmarks.recovery.cases import Options, groups
from benchmarks.recovery.figures import figures
from benchmarks.recovery.jobs import NAMESPACE
from benchmarks.recovery.journal import Journal
from benchmarks.recovery.page import page
from benchmarks.report import Figure, write

JOURNAL = Path("build/bench/recovery.jsonl")
IMAGES = ("holdfast/operator:dev", "holdfast/sidecar:dev", "holdfast/trainer-gpt:dev")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--state-mib", type=int, default=256, help="state of each of four ranks")
    parser.add_argument("--only", default="", help="cases, such as B1,B3; all by default")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    options = parser.parse_args(arguments)
    if options.fresh:
        JOURNAL.unlink(missing_ok=True)
    journal = Journal(JOURNAL, _setting(options.state_mib))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    kube = Kube()
    faults.heal_nodes()
    kube.delete_namespace(NAMESPACE)
    kube.wait_namespace_gone(NAMESPACE)
    install.ensure_installed(kube)
    prepare_namespace(kube, NAMESPACE)
    wanted = {name for name in options.only.split(",") if name}
    try:
        for group in groups(kube, Options(options.repeats, options.state_mib)):
            cases = [c for c in group if not wanted or c[0] in wanted]
            missing = [(n, c) for c in cases for n in journal.missing(c[0], c[1])]
            for repetition, (name, of, measure) in sorted(missing, key=lambda pair: pair[0]):
                entry = measure(repetition)
                entry.details["operator_mib"] = _operator_mib(kube)
                journal.append(entry)
                _written(journal, options.state_mib)
                print(
                    f"  {name} {repetition + 1}/{of}: {entry.seconds} s {entry.details}", flush=True
                )
            if missing:
                jobs.clear(kube)
    finally:
        faults.heal_nodes()
        kube.delete_namespace(NAMESPACE)
    found = _written(journal, options.state_mib)
    print(page(found, _what(options.state_mib)))
    return 1 if any(f.ok is False for f in found) else 0


def _end(*_: object) -> NoReturn:
    """End with what the end cleans up. A process group and `uv run` pass a signal on, so it comes twice."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(143)


def _operator_mib(kube: Kube) -> float | None:
    """Return the resident memory of the operator, or None if it does not answer."""
    pod = install.operator_pod(kube)
    text = None if pod is None else kube.proxy_text(install.NAMESPACE, pod, 8080, "metrics")
    for line in (text or "").splitlines():
        if line.startswith("process_resident_memory_bytes "):
            return round(float(line.split()[1]) / (1 << 20), 1)
    return None


def _setting(state_mib: int) -> str:
    labels = [image_label(current_bed(), image) or "unknown" for image in IMAGES]
    return f"{state_mib} MiB, images {' '.join(labels)}"


def _what(state_mib: int) -> str:
    return f"{state_mib} MiB of state in each of four ranks"


def _written(journal: Journal, state_mib: int) -> list[Figure]:
    found = figures(journal.entries())
    path = write("recovery", found)
    path.with_suffix(".md").write_text(page(found, _what(state_mib)))
    chart.draw(path.with_suffix(".png"), found)
    return found


if __name__ == "__main__":
    sys.exit(main())
