"""The results as Markdown: verdicts, participants, the machine, and the reasons for what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import Figure, table, verdict


def page(title: str, figures: Sequence[Figure]) -> str:
    targets = [f for f in figures if _is_target(f)]
    others = [f for f in figures if not _is_target(f)]
    lines = [f"# {title}", "", *_runs(figures), "", table(targets), ""]
    saves = [f for f in others if f.id.startswith("save ") and f.value is not None]
    if saves:
        lines += [
            "## Saves",
            "",
            "| participant | blocked s | first save, blocked s | durable GiB/s | CPU s/GiB |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {f.id.removeprefix('save ')} | {f.value} | {f.details['first_blocked']} "
            f"| {f.details['durable_gib_per_second']} | {f.details['cpu_seconds_per_gib']} |"
            for f in saves
        ]
        lines.append("")
    rest = [f for f in others if f.value is not None and f not in saves]
    if rest:
        lines += [
            "## Other participants and limits of this machine",
            "",
            "| what | median | unit | min | max |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {f.id} | {f.value} | {f.unit} | {f.details['min']} | {f.details['max']} |"
            for f in rest
        ]
        lines.append("")
    missing = [f for f in figures if f.value is None]
    if missing:
        lines += ["## Not measured", ""]
        lines += [f"- **{f.id}**: {f.details.get('reason', '')}" for f in missing]
        lines.append("")
    return "\n".join(lines)


def verdicts(figures: Sequence[Figure]) -> str:
    """Return one line of plain text for each target."""
    lines: list[str] = []
    for f in figures:
        if not _is_target(f):
            continue
        if f.value is None:
            lines.append(f"{f.id}: not measured: {f.details.get('reason', '')}")
        elif f.target is not None:
            word = {"yes": "reached", "NO": "MISSED"}[verdict(f)]
            lines.append(f"{f.id}: {word}: {f.value} {f.unit} (target {f.bound} {f.target})")
    return "\n".join(lines)


def _is_target(figure: Figure) -> bool:
    """Return whether the figure has a target id such as A1 or A2-dcp, unlike `limit memcpy 1 thread`."""
    return " " not in figure.id


def _runs(figures: Sequence[Figure]) -> list[str]:
    """Return the date, size and load of each part's run. Parts may come from different runs."""
    runs: dict[str, dict[str, object]] = {}
    for figure in figures:
        run = figure.details.get("run")
        if isinstance(run, dict):
            runs.setdefault(str(run["part"]), run)
    return [
        f"- {part}: {run['at']}, {run['mib']} MiB, {run['rounds']} rounds, "
        f"{run['cores']} cores, {_percent(run['stolen'])} of their time stolen, "
        f"{_percent(run['busy'])} busy, load {run['load_at_start']} to {run['load_at_end']}, "
        f"torch {run['torch']}"
        for part, run in runs.items()
    ]


def _percent(share: object) -> str:
    return f"{float(str(share)) * 100:.1f} %"
