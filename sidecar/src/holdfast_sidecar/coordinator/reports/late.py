"""Find the ranks that the others wait for, from the steps and the stacks of a gang that hangs. Pure.

1. If some ranks have finished fewer steps than another one, the late ranks are among these. They need not
   all be late: a collective that lacks one rank ends on some of the others and not on the rest.
2. Among them, or among all if no rank is behind, a rank whose stack cannot be read is late: its process is
   stopped, or hangs in a system call.
3. Otherwise, if some of them wait in torch for others, those that do not are late.
4. Otherwise, all ranks that are behind are late.
5. Otherwise, if more than half of the ranks are at the same place, the others are late.
6. Otherwise, no rank is known to be late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from holdfast_core.ids import Rank
from holdfast_core.messages.common import RankStack
from holdfast_core.messages.operator import Hang

_SHOWN_RANKS = 8
_SHOWN_STACKS = 3
_NO_STACK = "its launcher sent no stack"


def find_late(
    steps: Mapping[Rank, int], stacks: Mapping[Rank, RankStack], waited: float, limit: float
) -> Hang:
    """Describe a hang.

    Args:
        steps: Number of steps that each rank has finished.
        stacks: Stack of each rank whose launcher has answered.
        waited: Seconds without a step.
        limit: Seconds after which this is a hang.
    """
    late = _late(steps, stacks)
    text = f"no rank has finished a step for {waited:.0f} s, the limit is {limit:.0f} s"
    others = [r for r in sorted(steps) if r not in late]
    if late:
        text += f"; {_names(late)} did not arrive: {_places(late, stacks)}"
    if others:
        what = "the others are" if late else "every rank is"
        text += f"; {what} in: {_places(others, stacks)}"
    return Hang(tuple(late), text)


def _late(steps: Mapping[Rank, int], stacks: Mapping[Rank, RankStack]) -> list[Rank]:
    ranks = sorted(steps)
    newest = max(steps.values())
    behind = [r for r in ranks if steps[r] < newest]
    among = behind or ranks
    unknown = [r for r in among if r not in stacks or not stacks[r].is_known]
    if unknown:
        return unknown if len(unknown) < len(among) else behind
    busy = [r for r in among if not stacks[r].waits]
    if 0 < len(busy) < len(among):
        return busy
    if behind:
        return behind
    place, count = Counter(stacks[r].stack for r in ranks).most_common(1)[0]
    return [r for r in ranks if stacks[r].stack != place] if 2 * count > len(ranks) else []


def _names(ranks: list[Rank]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = len(ranks) - _SHOWN_RANKS
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {shown} and {more} more" if more > 0 else f"{word} {shown}"


def _places(ranks: Iterable[Rank], stacks: Mapping[Rank, RankStack]) -> str:
    """Return where these ranks are, the places with the most ranks first."""
    counted = Counter(stacks[r].stack if r in stacks else _NO_STACK for r in ranks)
    shown = [
        place if number == 1 else f"{place} ({number} ranks)"
        for place, number in counted.most_common(_SHOWN_STACKS)
    ]
    return "; ".join(shown)
