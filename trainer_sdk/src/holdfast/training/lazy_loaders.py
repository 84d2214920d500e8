"""Detects data loader iterators that a script makes after its random number generators were restored.

`iter(DataLoader)` draws a seed from torch's generator. If that happens after the restore, it shifts every
random number that follows. The order of data and dropout then differ from an uninterrupted run.
"""

from __future__ import annotations

import gc
import logging
import sys
from typing import Any

from holdfast.state.tensors import torch_module

logger = logging.getLogger(__name__)


class LazyLoaderWatch:
    """Checks for such iterators once after each restore, when the first step is done."""

    def __init__(self) -> None:
        self._next_seed: int | None = None

    def restored(self) -> None:
        """Record the seed that an iterator would draw next. Call it after the generators were restored.

        The seed is drawn from a copy, so that torch's generator does not change.
        """
        torch = torch_module()
        if torch is None:
            return
        copied = torch.Generator()
        copied.set_state(torch.get_rng_state())
        self._next_seed = _draw(torch, copied)

    def step_done(self) -> None:
        """Warn if an iterator drew its seed from the restored generator."""
        seed, self._next_seed = self._next_seed, None
        if seed is not None and any(one._base_seed == seed for one in _iterators()):
            logger.warning(
                "an iterator of a DataLoader was created after the random number generators were "
                "restored and drew from them: the order of data and all random numbers differ "
                "from a run without the interruption. Create it in before_rng: ckpt.steps(total, "
                "state, before_rng=start), see docs/training.md section 3"
            )


def _draw(torch: Any, generator: Any) -> int:
    """Draw a number in the way in which torch.utils.data.dataloader draws `_base_seed`."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _iterators() -> list[Any]:
    module = sys.modules.get("torch.utils.data.dataloader")
    base = getattr(module, "_BaseDataLoaderIter", None)
    if base is None:
        return []
    kinds = [base]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # An instance refers to its class. This scans all objects of the process once, in C.
    found = gc.get_referrers(*kinds)
    return [one for one in found if isinstance(one, base) and hasattr(one, "_base_seed")]
