"""benchmarks/results/integrations.md, from the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MIB = 1 << 20
_HEADS = (
    "adapter",
    "version",
    "lines to add",
    "kills",
    "starts that restored",
    "identical",
    "state, MiB",
    "blocked, ms",
    "framework's own, ms",
    "ratio",
    "its saver",
    "load",
)


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of all adapters in `results`."""
    lines = [
        "<!-- Written by python -m benchmarks.integrations. Do not edit. -->",
        "",
        "# Adapters to training frameworks",
        "",
        "Each adapter trains once undisturbed, and several times with kills (SIGKILL) after random steps. "
        "A process that was killed before its first save was durable leaves nothing to restore. "
        "*Identical* says whether all of them end in the same bits. *Blocked* is the median time for which "
        "one save blocks the training, alternately with Holdfast and with the framework's own saver in one "
        "process, without a GPU. Only the ratio of the two is meaningful. *Load* is the load average of the "
        "machine before the adapter's first training.",
        "",
        f"| {' | '.join(_HEADS)} |",
        "|---" * len(_HEADS) + "|",
    ]
    for name, one in sorted(results.items()):
        ours, theirs = one["blocked_seconds"], one["their_blocked_seconds"]
        lines.append(
            f"| {name} | {one['version']} | {one['lines']} | {one['kills']} | "
            f"{sum(start > 1 for starts in one['starts'] for start in starts)} | "
            f"{'yes' if one['identical'] else 'NO'} | {one['state_bytes'] / _MIB:.0f} | "
            f"{ours * 1e3:.0f} | {theirs * 1e3:.0f} | {ours / theirs:.2f} | {one['theirs']} | "
            f"{one['load']} |"
        )
    return "\n".join(lines) + "\n"
