"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import Figure, table


def page(found: Sequence[Figure]) -> str:
    targets = [f for f in found if " " not in f.id]
    measured = [f for f in found if "phase" in f.details]
    lines = [
        "# Many ranks: what a gang costs its coordinator",
        "",
        table(targets),
        "",
        "| phase | workers | coordinator CPU s | wall s | peak MiB | sent MB | received MB "
        "| longest callback, ms | member CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for f in sorted(measured, key=lambda f: (str(f.details["phase"]), int(f.details["workers"]))):
        d = f.details
        longest = max(d["longest_ms"].values(), default=0.0)
        lines.append(
            f"| {d['phase']} | {d['workers']} | {f.value} | {d['wall_seconds']} | {d['peak_mib']} "
            f"| {d['sent_bytes'] / 1e6:.2f} | {d['received_bytes'] / 1e6:.2f} "
            f"| {longest or '< 5'} | {d['member_cpu_seconds']} |"
        )
    lines += [
        "",
        "| the store | CPU s | wall s | peak MiB | checkpoints deleted |",
        "|---|---|---|---|---|",
    ]
    for f in found:
        d = f.details
        if "store_phase" in d:
            row = (f.id, f.value, d["wall_seconds"], d["peak_mib"], d["count"])
            lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join([*lines, ""])
