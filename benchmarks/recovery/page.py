"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import Figure, verdict
from holdfast_core.names import RECOVERY_PHASES


def page(found: Sequence[Figure], setting: str) -> str:
    """Return the page: a row for each figure, then the phases of each kind of fault."""
    lines = [
        "# Recoveries on the test bed's cluster",
        "",
        f"Measured with {setting}. The four nodes of the kind cluster are containers of one machine. They",
        "share its cores and its disk. A node loses power when its container is killed. All loads are in the",
        "JSON file.",
        "",
        "| id | what | p50 or count | p99 | max | unit | target | ok | repetitions | load |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for f in found:
        d = f.details
        load = f"{min(d['load'])} to {max(d['load'])}" if d.get("load") else ""
        value = "" if f.value is None else f.value
        target = "" if f.target is None else f"{f.bound} {f.target:g}"
        lines.append(
            f"| {f.id} | {d.get('what', '')} | {value} | {d.get('p99', '')} | {d.get('max', '')} | {f.unit} "
            f"| {target} | {verdict(f)} | {f.repetitions} | {load} |"
        )
    lines += [
        "",
        "Median seconds of each phase, by `status.recoveries`:",
        "",
        "| id | " + " | ".join(RECOVERY_PHASES) + " | rounds | lost steps |",
        "|---" * (len(RECOVERY_PHASES) + 3) + "|",
    ]
    for f in (f for f in found if f.details.get("phases")):
        d = f.details
        cells = [str(d["phases"].get(phase, "")) for phase in RECOVERY_PHASES]
        rounds, lost = (f"{min(d[k])} to {max(d[k])}" for k in ("rounds", "lost_steps"))
        lines.append(f"| {f.id} | {' | '.join(cells)} | {rounds} | {lost} |")
    return "\n".join([*lines, ""])
