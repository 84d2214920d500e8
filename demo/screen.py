"""Terminal output while the demo runs: loss, step, levels, a ranks x tiers map, and recent notes.

A terminal shows one live screen. Other outputs (a log, CI) get a line at each change.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from demo.recorder import Act, Recorder, Sample

BLOCKS = "▁▂▃▄▅▆▇█"
TIERS = ("memory", "node", "peer", "object")


class Screen:
    def __init__(self, recorder: Recorder, title: str) -> None:
        self.recorder = recorder
        self.title = title
        self.console = Console()
        self._live = Live(console=self.console, refresh_per_second=4, transient=False)
        self._printed: tuple[str, int, int] | None = None

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self.refresh()
            self._live.stop()

    def note(self, text: str) -> None:
        self.recorder.notes.append(text)
        if not self.console.is_terminal:
            self.console.print(text, highlight=False)
        self.refresh()

    def refresh(self) -> None:
        if self.console.is_terminal:
            self._live.update(self._render())
            return
        latest = self.recorder.latest
        if latest is None or latest.step is None:
            return
        tenth = max(1, self.recorder.total_steps // 10)
        key = (latest.phase, latest.round, latest.step // tenth)
        if key != self._printed:
            self._printed = key
            self.console.print(status_line(latest, self.recorder.total_steps), highlight=False)

    def _render(self) -> Panel:
        latest = self.recorder.latest
        parts: list[Table | Text] = []
        head = Table.grid(padding=(0, 2))
        if latest is not None:
            step = latest.step or 0
            head.add_row(
                Text(
                    latest.phase or "Pending",
                    style="bold green" if latest.phase == "Running" else "bold yellow",
                ),
                f"round {latest.round}",
                f"step {step}/{self.recorder.total_steps}",
                ProgressBar(total=self.recorder.total_steps, completed=step, width=24),
            )
            head.add_row(
                f"loss {latest.loss:.4f}" if latest.loss is not None else "loss -",
                "",
                f"committed {_step(latest.committed)}",
                f"persisted {_step(latest.persisted)}",
            )
            parts.append(head)
            parts.append(
                Text("loss  " + sparkline([p[2] for p in self.recorder.losses()], 64), style="cyan")
            )
            parts.append(_tier_map(latest.tiers))
        parts.extend(Text(note) for note in self.recorder.notes[-9:])
        return Panel(Group(*parts), title=self.title, border_style="blue")

    def summary(self) -> None:
        """Print for each act what was lost, the source of the restored bytes, and the duration of each
        phase.

        The output fits 80 columns.
        """
        self.console.print("What was lost, and what it cost", style="bold", highlight=False)
        for act in self.recorder.acts:
            self.console.print(Text(act_line(act)), highlight=False)
            for line in (act.lost, *phases_lines(act)):
                self.console.print(Text(f"    {line}", style="dim"))


def status_line(sample: Sample, total_steps: int) -> str:
    """Return a sample as a line of a log."""
    return (
        f"  {sample.phase:<10} round {sample.round}  step {_step(sample.step)}/{total_steps}  "
        f"committed {_step(sample.committed)}  persisted {_step(sample.persisted)}"
    )


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)


def act_line(act: Act) -> str:
    """Return a line with the act, the source of the restored bytes, and how long the gang did not train."""
    recovery = act.recovery
    if recovery is None:
        return f"  {act.title:<19}step {act.step_before}: not recovered"
    source = recovery.served_by or act.source
    reached = act.step_before
    if recovery.lost_steps is not None:
        # The gang trained on between the last sample and the failure. The operator knows a step a little
        # later than the metrics show it.
        reached = max(reached, recovery.restored_step + recovery.lost_steps)
    steps = f"step {reached} -> {recovery.restored_step}"
    return f"  {act.title:<19}{steps:<18}from {source:<22}{recovery.total_seconds:>6.1f} s"


def phases_lines(act: Act) -> list[str]:
    """Return lines with the phases that took a tenth of a second or more. They add up to the total."""
    lines: list[str] = []
    for name, seconds in act.phases().items():
        words = f"{name} {seconds:.1f}"
        if lines and len(lines[-1]) + len(words) + 2 <= 72:
            lines[-1] += f", {words}"
        else:
            lines.append(words)
    return lines or ["-"]


def _tier_map(tiers: dict[int, dict[str, int]]) -> Table:
    """Return a table with a row for each rank, and the newest step that each tier holds of it."""
    table = Table(box=None, padding=(0, 2))
    table.add_column("rank", justify="right", style="dim")
    newest = max((s for held in tiers.values() for s in held.values()), default=0)
    for tier in TIERS:
        table.add_column(tier, justify="right")
    for rank in sorted(tiers):
        cells = [Text(str(rank))]
        for tier in TIERS:
            step = tiers[rank].get(tier)
            style = "dim" if step is None else ("green" if step == newest else "yellow")
            cells.append(Text("·" if step is None else str(step), style=style))
        table.add_row(*cells)
    return table


def sparkline(values: list[float], width: int) -> str:
    """Return the last `width` values as block characters, scaled to their own range."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(BLOCKS[int((v - low) / span * (len(BLOCKS) - 1))] for v in shown)
