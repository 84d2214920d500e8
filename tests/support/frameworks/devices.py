"""The scripts of docs/integrations with kills, on the CPU and on a GPU.

On a GPU each process is one of its own, and imports its framework again. Gangs have one rank there, because
ranks need a GPU each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.frameworks.forked import Training, train_forked
from tests.support.frameworks.kills import Trained, python, train
from tests.support.frameworks.pages import script_of

_SCRIPTS = Path(__file__).resolve().parents[2] / "frameworks" / "scripts"

_FSDP = (
    ('init_process_group("gloo")', 'init_process_group("cpu:gloo,cuda:nccl")'),
    ('init_device_mesh("cpu"', 'init_device_mesh("cuda"'),
    (".detach().numpy()", ".detach().cpu().numpy()"),
)
_ON_GPU: dict[str, tuple[tuple[str, str], ...]] = {
    "accelerate.md": (("Accelerator(cpu=True)", "Accelerator()"),),
    "dcp.md": _FSDP,
    "deepspeed.md": (),
    "lightning.md": (),
    "megatron.md": (),
    "torchtitan.md": _FSDP,
    "transformers.md": (("use_cpu=True", "use_cpu=False"),),
}
"""What each page's script says about the CPU, and what it says instead on a GPU."""


def script_on_gpu(page: str) -> str:
    """Return the script of a page as it trains on a GPU."""
    script = script_of(page)
    for on_cpu, on_gpu in _ON_GPU[page]:
        assert on_cpu in script, f"{page}: expected {on_cpu}"
        script = script.replace(on_cpu, on_gpu)
    return script


def train_page(
    page: str,
    device: str,
    folder: Path,
    *,
    preload: Sequence[str] = (),
    kills: int,
    least_steps: int,
    most_steps: int,
    ranks: int | None = None,
) -> tuple[Trained, Trained]:
    """Train the script of a page without and with kills.

    device: "cpu" or "cuda".
    preload, ranks: see `forked`. On a GPU they have no effect.
    """
    if device == "cpu":
        script = folder / "train.py"
        script.write_text(script_of(page))
        plan = [
            Training(folder / "whole", ranks=ranks),
            Training(folder / "killed", (), kills, 1, least_steps, most_steps, ranks=ranks),
        ]
        whole, killed = train_forked(script, plan, preload=preload)
        return whole, killed
    command = python(_SCRIPTS / "page_of_one_rank.py", page, device)
    for name in ("whole", "killed"):
        (folder / name).mkdir()
    whole = train(command, folder / "whole")
    killed = train(
        command,
        folder / "killed",
        kills=kills,
        seed=1,
        least_steps=least_steps,
        most_steps=most_steps,
    )
    return whole, killed
