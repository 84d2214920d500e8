"""What a terminal shows of jobs and Checkpoints, which are dicts here. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast_cli.gangs import KINDS, MemberPod
from holdfast_cli.output import Cell, Column, Line, Table
from holdfast_core.ids import TierName
from holdfast_core.names import RECOVERY_PHASES

TIERS = tuple(TierName)
BAR_CELLS = 24
_TROUBLE = frozenset(
    {
        ("Accepted", "False"),
        ("Readable", "False"),
        ("RemoteTierHealthy", "False"),
        ("SidecarsUnreachable", "True"),
        ("CheckpointMissing", "True"),
        ("CheckpointsLost", "True"),
        ("UploadsHeld", "True"),
        ("PodsKept", "True"),
        ("Adopted", "False"),
        ("Failed", "True"),
        ("HangsRepeat", "True"),
        ("Reconciled", "False"),
    }
)
"""Conditions that the screen shows in red, with the status at which it shows them."""
_TROUBLE_BY_REASON = frozenset(
    {
        ("Resizing", "False", "NoObjectTier"),
        ("Resizing", "False", "ResizeFailed"),
        ("WorkersMissing", "True", "CannotShrink"),
    }
)
"""The same for conditions that are trouble for these reasons only."""
_WORDS = frozenset(
    {
        ("Adopted", "True"),
        ("Complete", "True"),
        ("Resizing", "True"),
        ("Running", "False"),
        ("SparesReady", "False"),
        ("SpecApplied", "False"),
        ("WorkersMissing", "True"),
    }
)
"""Conditions that the screen shows although they are no trouble."""
SHOWN_CHECKPOINTS = 3
SHOWN_RECOVERIES = 5
_GANG_COLUMNS = (
    "NAME",
    "PHASE",
    "REASON",
    "STEP",
    "COMMITTED",
    "PERSISTED",
    "WORKERS",
    "RESTARTS",
    "GOODPUT",
)
_CHECKPOINT_COLUMNS = (
    "NAME",
    "JOB",
    "STEP",
    "PHASE",
    "SIZE",
    "PINNED",
    Column("ROUND", wide=True),
    Column("RANKS", wide=True),
    Column("TIERS", wide=True),
    Column("SAVED", wide=True),
    Column("VERIFIED", wide=True),
    Column("METRICS", wide=True),
)


@dataclass(frozen=True, slots=True)
class Screen:
    """What the screen about one gang shows."""

    gang: dict[str, Any]
    """The TrainingJob or the CheckpointAdoption."""
    members: Sequence[MemberPod] = ()
    tiers: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Newest step by rank and tier."""
    checkpoints: Sequence[dict[str, Any]] = ()
    problems: Sequence[str] = ()
    """What could not be read, in sentences."""


def status_lines(screen: Screen) -> list[Line]:
    """Return one screen: levels, recoveries, goodput, pods, steps by rank and tier, checkpoints, problems."""
    job = screen.gang
    status = job.get("status") or {}
    persisted = status.get("lastPersisted") or {}
    rows = (
        ("phase", status.get("phase", "Pending")),
        ("round", status.get("restartRound")),
        ("step", status.get("step")),
        ("committed", status.get("lastCommittedStep")),
        ("replicated", status.get("lastReplicatedStep")),
        ("persisted", persisted.get("step")),
        ("workers", workers_text(job)),
        *spares_row(job),
        *stragglers_row(status),
        ("restarts", status.get("restarts", 0)),
        ("goodput", goodput_bar((status.get("goodput") or {}).get("ratio"))),
    )
    head = Table(("", ""), [(Cell(name, "dim"), value) for name, value in rows], headings=False)
    lines: list[Line] = [Cell(f"{job['kind']} {job['metadata']['name']}", "bold"), head]
    recoveries = status.get("recoveries") or []
    if recoveries:
        lines += [recoveries_table(recoveries), Cell(phases_line(recoveries[-1]), "dim")]
        earlier = len(recoveries) - SHOWN_RECOVERIES
        if earlier > 0:
            lines.append(Cell(f"{earlier} earlier ones are in status.recoveries", "dim"))
    if screen.members:
        lines.append(members_table(screen.members))
    if screen.tiers:
        lines.append(tier_table(screen.tiers))
    if screen.checkpoints:
        lines.append(checkpoints_table(newest(screen.checkpoints)))
    for condition in status.get("conditions", []):
        trouble = is_trouble(condition)
        if trouble or (condition["type"], condition["status"]) in _WORDS:
            text = f"{condition['type']}: {condition['reason']}: {condition['message']}"
            lines.append(Cell(text, "red" if trouble else ""))
    lines.extend(Cell(problem, "red") for problem in screen.problems)
    return lines


def is_trouble(condition: Mapping[str, Any]) -> bool:
    """Return whether a condition of a gang says that something is wrong."""
    known = (condition["type"], condition["status"])
    return known in _TROUBLE or (*known, condition["reason"]) in _TROUBLE_BY_REASON


def running_reason(status: dict[str, Any]) -> str:
    """Return why a gang runs or does not, in one word."""
    conditions = status.get("conditions", [])
    return next((c["reason"] for c in conditions if c["type"] == "Running"), "-")


def gangs_lines(gangs: Sequence[dict[str, Any]], *, everywhere: bool = False) -> list[Line]:
    """Return a table of the gangs for each kind.

    Args:
        gangs: The gangs of one namespace, or of all namespaces.
        everywhere: Whether a column shows the namespaces.
    """
    lines: list[Line] = []
    for kind in KINDS:
        of_kind = [gang for gang in gangs if gang["kind"] == kind]
        if of_kind:
            lines += [Cell(f"{kind}s", "bold"), _gangs_table(of_kind, everywhere)]
    place = "the cluster" if everywhere else "the namespace"
    return lines or [f"{place} has no {' and no '.join(KINDS)}"]


def _gangs_table(gangs: Sequence[dict[str, Any]], everywhere: bool) -> Table:
    rows = []
    for gang in sorted(gangs, key=lambda g: (*_namespace(g, everywhere), g["metadata"]["name"])):
        status = gang.get("status") or {}
        ratio = (status.get("goodput") or {}).get("ratio")
        row = (
            *_namespace(gang, everywhere),
            gang["metadata"]["name"],
            status.get("phase", "Pending"),
            running_reason(status),
            status.get("step"),
            status.get("lastCommittedStep"),
            (status.get("lastPersisted") or {}).get("step"),
            workers_text(gang),
            status.get("restarts", 0),
            None if ratio is None else f"{ratio:.1%}",
        )
        rows.append(row)
    return Table(_columns(_GANG_COLUMNS, everywhere), rows)


def metrics_text(values: Mapping[str, float]) -> str | None:
    """Return the values of metrics in one cell."""
    return ", ".join(f"{name}={value:g}" for name, value in sorted(values.items())) or None


def _columns(names: Sequence[Column | str], everywhere: bool) -> Sequence[Column | str]:
    return ("NAMESPACE", *names) if everywhere else names


def _namespace(item: dict[str, Any], everywhere: bool) -> tuple[str, ...]:
    """Return the cell that comes first in the rows of all namespaces, and by which they are sorted."""
    return (item["metadata"]["namespace"],) if everywhere else ()


def workers_text(gang: dict[str, Any]) -> str:
    return str((gang.get("status") or {}).get("readyWorkers") or f"0/{gang['spec']['workers']}")


def spares_row(gang: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the row about the spare pods of a gang that has some: those that are ready, and their number."""
    wanted = gang["spec"].get("spares", 0)
    ready = ((gang.get("status") or {}).get("spares") or {}).get("ready", 0)
    return [("spares", f"{ready}/{wanted} ready")] if wanted else []


def members_table(members: Sequence[MemberPod]) -> Table:
    """Return the table of the workers' pods."""
    rows = []
    for member in members:
        cells = (member.worker, member.pod, member.node, member.phase, member.restarts)
        rows.append([Cell(str(cell), "" if member.exists else "yellow") for cell in cells])
    return Table(("WORKER", "POD", "NODE", "PHASE", "RESTARTS"), rows)


def newest(checkpoints: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the checkpoints of the newest steps."""
    return sorted(checkpoints, key=lambda c: c["spec"].get("step") or 0)[-SHOWN_CHECKPOINTS:]


def tier_table(tiers: Mapping[int, Mapping[str, int]]) -> Table:
    """Return the table of newest steps by rank and tier. `tiers` must hold at least one step."""
    newest = max(step for held in tiers.values() for step in held.values())
    rows = []
    for rank in sorted(tiers):
        cells = [Cell(str(rank), "dim")]
        for tier in TIERS:
            step = tiers[rank].get(tier)
            if step is None:
                cells.append(Cell("·", "dim"))
            else:
                cells.append(Cell(str(step), "green" if step == newest else "yellow"))
        rows.append(cells)
    return Table([Column(name, right=True) for name in ("rank", *TIERS)], rows)


def goodput_bar(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    filled = round(max(0.0, min(1.0, ratio)) * BAR_CELLS)
    return f"{'█' * filled}{'░' * (BAR_CELLS - filled)} {ratio:.1%}"


def stragglers_row(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the row with the ranks that are slower than the others, if there are any."""
    ranks = status.get("stragglers") or []
    return [("stragglers", "ranks " + ", ".join(map(str, ranks)))] if ranks else []


def recoveries_table(recoveries: Sequence[dict[str, Any]]) -> Table:
    """Return the table of the newest recoveries, the newest first."""
    rows = []
    for recovery in reversed(recoveries[-SHOWN_RECOVERIES:]):
        total = recovery.get("totalSeconds")
        row = (
            f"round {recovery.get('round', '-')}",
            recovery.get("reason", ""),
            ",".join(map(str, recovery.get("workers") or ["-"])),
            None if total is None else f"{total:.1f} s",
            recovery.get("restoredStep"),
            recovery.get("lostSteps"),
        )
        rows.append(row)
    return Table(("RECOVERY", "REASON", "WORKERS", "TOTAL", "RESTORED", "LOST"), rows)


def phases_of(recovery: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of the phases of a recovery that were measured, in the order of the phases."""
    seconds = recovery.get("phaseSeconds") or {}
    return {
        phase.replace("_", " "): seconds[phase] for phase in RECOVERY_PHASES if phase in seconds
    }


def phases_line(recovery: dict[str, Any]) -> str:
    """Return the nodes and the phases of a recovery, and how many ranks read their state from which tier."""
    phases = [f"{words} {seconds:.1f} s" for words, seconds in phases_of(recovery).items()]
    nodes, sources = recovery.get("nodes") or [], recovery.get("sources") or {}
    where = f" ({', '.join(nodes)})" if nodes else ""
    ranks = ", ".join(f"{tier} {sources[tier]}" for tier in TIERS if tier in sources)
    read = f". Ranks by the tier of their state: {ranks}" if ranks else ""
    return f"round {recovery.get('round', '-')}{where}: {', '.join(phases) or 'not measured'}{read}"


def checkpoints_table(items: Sequence[dict[str, Any]], *, everywhere: bool = False) -> Table:
    """Return the table of Checkpoints by step, or by namespace and step with a column for it."""
    rows = []
    for item in sorted(
        items, key=lambda i: (*_namespace(i, everywhere), i["spec"].get("step") or 0)
    ):
        status = item.get("status") or {}
        row = (
            *_namespace(item, everywhere),
            item["metadata"]["name"],
            item["spec"].get("jobRef", {}).get("name"),
            item["spec"].get("step"),
            status.get("phase"),
            status.get("size"),
            "yes" if item["spec"].get("pin") else "",
            status.get("round"),
            status.get("worldSize"),
            status.get("tiers"),
            status.get("committedAt"),
            status.get("verifiedAt"),
            metrics_text(status.get("metrics") or {}),
        )
        rows.append(row)
    return Table(_columns(_CHECKPOINT_COLUMNS, everywhere), rows)
