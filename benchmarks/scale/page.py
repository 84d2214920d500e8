"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import Figure, table


def page(found: Sequence[Figure]) -> str:
    used = [f for f in found if "cores" in f.details]
    lines = [
        "# One operator, many jobs",
        "",
        table(found),
        "",
        *(f"* {f.id}: {f.details['what']}" for f in found if "what" in f.details),
        "",
        "| what the operator used | seconds | CPU s | cores | MiB | passes | TLS handshakes |",
        "|---|---|---|---|---|---|---|",
    ]
    for f in used:
        d = f.details
        lines.append(
            f"| {f.id} | {d['seconds']} | {d['cpu_seconds']} | {d['cores']} | {d['memory_mib']} "
            f"| {d['passes']:.0f} | {d['handshakes']} |"
        )
    return "\n".join([*lines, ""])
