"""Tables for a terminal: turns objects (dicts) into rich renderables. Pure."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

TIERS = ("memory", "node", "peer", "object")
RECOVERY_PHASES = {
    "detectSeconds": "detect",
    "backOffSeconds": "back off",
    "sealSeconds": "seal",
    "scheduleSeconds": "schedule",
    "rehydrateSeconds": "rehydrate",
    "rendezvousSeconds": "rendezvous",
    "firstStepSeconds": "first step",
}
BAR_CELLS = 24
_TROUBLE = frozenset(
    {
        ("Accepted", "False"),
        ("Readable", "False"),
        ("RemoteTierHealthy", "False"),
        ("SidecarsUnreachable", "True"),
    }
)
"""Conditions that the screen shows, with the status at which it shows them."""


def status_view(job: dict[str, Any], tiers: dict[int, dict[str, int]]) -> RenderableType:
    """Return one screen about a job: levels, steps by rank and tier, recoveries, goodput, problems.

    Args:
        tiers: Newest step by rank and tier (Cluster.tiers).
    """
    status = job.get("status") or {}
    head = Table.grid(padding=(0, 2))
    workers = status.get("workers") or {}
    persisted = status.get("lastPersisted") or {}
    rows = (
        ("phase", status.get("phase", "Pending")),
        ("round", status.get("restartRound", "-")),
        ("step", status.get("step", "-")),
        ("memory", memory_line(status)),
        ("committed", status.get("lastCommittedStep", "-")),
        ("replicated", status.get("lastReplicatedStep", "-")),
        ("persisted", persisted.get("step", "-")),
        (
            "workers",
            f"{workers.get('ready', 0)}/{workers.get('total', job['spec'].get('workers'))}",
        ),
        ("restarts", status.get("restarts", 0)),
        ("goodput", goodput_bar((status.get("goodput") or {}).get("ratio"))),
        ("recoveries", recoveries_lines(status.get("recoveries") or [])),
    )
    for name, value in rows:
        head.add_row(Text(name, style="dim"), str(value))
    parts: list[RenderableType] = [Text(job["metadata"]["name"], style="bold"), head]
    if tiers:
        parts.append(tier_map(tiers))
    for condition in status.get("conditions", []):
        if (condition["type"], condition["status"]) in _TROUBLE:
            parts.append(
                Text(
                    f"{condition['type']}: {condition['reason']}: {condition['message']}",
                    style="red",
                )
            )
    return Group(*parts)


def tier_map(tiers: dict[int, dict[str, int]]) -> Table:
    """Return the table of newest steps by rank and tier. `tiers` must hold at least one step."""
    newest = max(step for held in tiers.values() for step in held.values())
    table = Table(box=None, padding=(0, 2))
    table.add_column("rank", justify="right", style="dim")
    for tier in TIERS:
        table.add_column(tier, justify="right")
    for rank in sorted(tiers):
        cells = [Text(str(rank))]
        for tier in TIERS:
            step = tiers[rank].get(tier)
            style = "dim" if step is None else "green" if step == newest else "yellow"
            cells.append(Text("·" if step is None else str(step), style=style))
        table.add_row(*cells)
    return table


def memory_line(status: dict[str, Any]) -> str:
    """Return the newest step at level memory, and how many steps of the round were replaced by newer ones."""
    step, dropped = status.get("lastMemoryStep", "-"), status.get("stepsDropped", 0)
    return f"{step} ({dropped} dropped)" if dropped else str(step)


def goodput_bar(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    filled = round(max(0.0, min(1.0, ratio)) * BAR_CELLS)
    return f"{'█' * filled}{'░' * (BAR_CELLS - filled)} {ratio:.1%}"


def recoveries_lines(recoveries: list[dict[str, Any]]) -> str:
    """Return one line for each recovery, the newest first."""
    return "\n".join(recovery_line(r) for r in reversed(recoveries)) or "none"


def recovery_line(recovery: dict[str, Any]) -> str:
    """Return round, reason, what was lost, total and phases of a recovery, in the order of the phases."""
    phases = [
        f"{text} {recovery[field]:.1f} s"
        for field, text in RECOVERY_PHASES.items()
        if recovery.get(field) is not None
    ]
    total, lost = recovery.get("totalSeconds"), recovery.get("lostSteps")
    workers, step = recovery.get("workers") or [], recovery.get("restoredStep")
    named = [f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"]
    names = ", ".join([*(named if workers else []), *(recovery.get("nodes") or [])])
    line = f"round {recovery.get('round', '-')}: {recovery.get('reason', '')}"
    line += f" ({names}): " if names else ": "
    line += ("" if total is None else f"{total:.1f} s: ") + ", ".join(phases)
    line += "" if step is None else f"; restored step {step}"
    return line + ("" if lost is None else f"; {lost} steps lost")


def checkpoints_view(items: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2))
    for column in ("NAME", "JOB", "STEP", "PHASE", "SIZE", "PINNED"):
        table.add_column(column)
    for item in sorted(items, key=lambda i: i["spec"].get("step") or 0):
        status = item.get("status") or {}
        table.add_row(
            item["metadata"]["name"],
            item["spec"].get("jobRef", {}).get("name", "-"),
            str(item["spec"].get("step", "-")),
            status.get("phase", "-"),
            size_text(status.get("bytes")),
            "yes" if item["spec"].get("pin") else "",
        )
    return table


def size_text(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "-"
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.1f} {units[0]}"
