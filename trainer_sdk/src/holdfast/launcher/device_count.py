"""Counts the devices for `--nproc-per-node gpu`, `xpu` and `auto`.

Only torch knows its devices (CUDA_VISIBLE_DEVICES, ROCm, MIG). It runs in a process of its own (`python -m`
with this module), because the launcher does not import torch, and a fork server that has initialised CUDA
could fork no ranks.
"""

from __future__ import annotations

import asyncio
import os
import sys

from holdfast_core.errors import ConfigError


async def count_ranks(text: str) -> int:
    """Return the number of ranks that `--nproc-per-node` names. Raises ConfigError if there is none."""
    if text.isdecimal():
        return int(text)
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdfast.launcher.device_count", text),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0 or not out.split() or int(out.split()[-1]) < 1:
        reason = err.decode(errors="replace").strip()[-500:] or f"torch finds no {text}"
        raise ConfigError(f"holdfast run: --nproc-per-node {text}: {reason}; give a number instead")
    return int(out.split()[-1])


def _count(what: str) -> int:
    """Return the number of devices, or of CPUs for `auto` on a machine without an accelerator."""
    import torch

    if what in ("gpu", "auto") and torch.cuda.is_available():
        return torch.cuda.device_count()
    if what in ("xpu", "auto") and hasattr(torch, "xpu") and torch.xpu.is_available():
        return torch.xpu.device_count()
    return len(os.sched_getaffinity(0)) if what == "auto" else 0


if __name__ == "__main__":
    sys.stdout.write(f"{_count(sys.argv[1])}\n")
