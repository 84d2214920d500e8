"""The scenarios of test_reshard_gangs: chains of worlds. Each restores what the previous one saved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    world: int
    kind: str


SCENARIOS: dict[str, tuple[Phase, ...]] = {
    "replicated 4-2-3": (Phase(4, "ddp"), Phase(2, "ddp"), Phase(3, "ddp")),
    "fully sharded 8-6-8": (Phase(8, "fsdp"), Phase(6, "fsdp"), Phase(8, "hsdp")),
    "one to four to one": (Phase(1, "plain"), Phase(4, "fsdp"), Phase(1, "plain")),
    "tensor parallel 4-3": (Phase(4, "tp"), Phase(3, "tp")),
    "two by two": (Phase(4, "2d"), Phase(4, "fsdp"), Phase(6, "2d")),
    "same ranks, cut otherwise": (Phase(2, "ddp"), Phase(2, "fsdp"), Phase(2, "tp")),
}
