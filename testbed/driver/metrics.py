"""Current state of a job's sidecars, read from their metrics through the API server.

The operator writes the status at most every 10 seconds, which is too slow for a live display.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from testbed.driver.jobs import TRAINER_IMAGE, Job
from testbed.driver.kube import Kube

_SAMPLE = re.compile(r"^(?P<name>holdfast_[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(slots=True)
class GangMetrics:
    step: int | None = None
    loss: float | None = None
    committed: int | None = None
    tiers: dict[int, dict[str, int]] = field(default_factory=dict)
    restored: dict[int, str] = field(default_factory=dict)
    """Tier that served the shard in this round, by rank."""


def parse(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Return (name, labels, value) of the Holdfast samples in a Prometheus text."""
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            labels = dict(_LABEL.findall(match["labels"] or ""))
            samples.append((match["name"], labels, float(match["value"])))
    return samples


def gang(job: Job, pool: ThreadPoolExecutor) -> GangMetrics:
    """Read the metrics of all members once. A pod that does not answer is skipped."""
    found = GangMetrics()
    texts = pool.map(
        lambda name: job.kube.proxy_text(job.namespace, name, 7072, "metrics"), job.pod_names()
    )
    for text in texts:
        collect(found, text or "")
    return found


def collect(found: GangMetrics, text: str) -> None:
    """Add one sidecar's metrics to `found`."""
    for name, labels, value in parse(text):
        _add(found, name, labels, value)


def _add(found: GangMetrics, name: str, labels: dict[str, str], value: float) -> None:
    rank = int(labels.get("rank", -1))
    if name == "holdfast_step":
        found.step = max(found.step or 0, int(value))
    elif name == "holdfast_reported" and labels.get("name") == "loss" and rank == 0:
        found.loss = value
    elif name == "holdfast_newest_step":
        found.tiers.setdefault(rank, {})[labels["tier"]] = int(value)
    elif name == "holdfast_committed_step" and labels.get("level") == "local":
        found.committed = max(found.committed or 0, int(value))
    elif name == "holdfast_restored_from" and value:
        found.restored[rank] = labels["tier"]


def served_by(found: GangMetrics) -> str:
    """Return the number of shards that each tier served, as text: `memory x3, peer x1`."""
    counts: dict[str, int] = {}
    for tier in found.restored.values():
        counts[tier] = counts.get(tier, 0) + 1
    return ", ".join(f"{tier} x{n}" for tier, n in sorted(counts.items()))


def image_id(kube: Kube) -> str:
    """Return the sizes of the trainer images on the nodes, which serve as the image's identity.

    A reference run is valid for one image only.
    """
    ids = set()
    for node in kube.plain(kube.core.list_node())["items"]:
        for image in node["status"].get("images", []):
            if any(TRAINER_IMAGE in name for name in image.get("names", [])):
                ids.add(str(image.get("sizeBytes")))
    return "+".join(sorted(ids))
