"""One rank of the gang of test_reshard_gangs, which runs every scenario, phase by phase.

In each phase the first ranks of the gang fork one process each, which has already imported torch. These
processes form a world, build the model with a sharding, restore what the previous phase saved with another
number of ranks or another sharding, compare all of it bit by bit with an unsharded reference that every
process computes itself, train a step and save.

Gradients are random numbers instead of results of a backward pass. The effect of a step on an element then
does not depend on the sharding, so that the reference is exact.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scenarios import SCENARIOS, Phase  # type: ignore[import-not-found]
from tests.support.hang import HANG_SECONDS
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast


class Model(nn.Module):
    """A model whose sizes do not divide by the numbers of ranks: parts are uneven, and some are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 13)
        self.norm = nn.LayerNorm(13)
        self.down = nn.Linear(13, 7)
        self.scale = nn.Parameter(torch.randn(1, 3))
        self.register_buffer("count", torch.randint(1 << 40, ()))
        self.register_buffer("phase", torch.randn(3, 2, dtype=torch.complex128))


def built(kind: str, world: int) -> nn.Module:
    model = Model()
    match kind:
        case "plain":
            return model
        case "ddp":
            return nn.parallel.DistributedDataParallel(model)
        case "fsdp":
            return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        case "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copy", "shard"))
            return fully_shard(model, mesh=mesh)
        case "tp":
            return tensor_parallel(model, init_device_mesh("cpu", (world,)))
        case "2d":
            mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
            tensor_parallel(model, mesh["tp"])
            return fully_shard(model, mesh=mesh["dp"])
        case _:
            raise AssertionError(kind)


def tensor_parallel(model: Model, mesh: Any) -> nn.Module:
    """Shard `up` on dimension 0 and `down` on dimension 1. The rest is replicated."""
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def part(full: torch.Tensor, holder: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `full`, sharded as `holder` is. The last mesh dimension is applied first."""
    if not isinstance(holder, DTensor):
        return full
    where = holder.device_mesh.get_coordinate()
    for axis in reversed(range(holder.device_mesh.ndim)):
        dimension = getattr(holder.placements[axis], "dim", None)
        if dimension is not None:
            pieces = full.chunk(holder.device_mesh.size(axis), dimension)
            empty = full.narrow(dimension, 0, 0)
            full = pieces[where[axis]] if where[axis] < len(pieces) else empty
    return full


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)


def plain(model: nn.Module) -> Any:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


class Reference:
    """The same training, unsharded, in every process."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.model = Model()
        self.optimizer = optimizer_of(self.model)
        self.steps = 0

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Do one step of both models with the same gradients."""
        generator = torch.Generator().manual_seed(self.steps)
        others = dict(plain(model).named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            other = others[name]
            other.grad = torch.zeros_like(other)
            local(other.grad).copy_(part(parameter.grad, other))
        for one in (self.optimizer, optimizer):
            one.step()
            one.zero_grad()
        self.steps += 1

    def give(self, model: nn.Module) -> None:
        own = self.model.state_dict()
        with torch.no_grad():
            for name, value in plain(model).state_dict().items():
                local(value).copy_(part(own[name], value))

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        found = plain(model).state_dict()
        for name, value in self.model.state_dict().items():
            same(name, local(found[name]), part(value, found[name]))
        others = dict(plain(model).named_parameters())
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                other = optimizer.state[others[name]][key]
                same(f"{name} {key}", local(other), part(value, other))


def same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype, name
    assert found.shape == expected.shape, name
    raw = [t.contiguous().view(-1).view(torch.uint8) for t in (found, expected)]
    assert torch.equal(*raw), f"{name}: {found} is not {expected}"


def play(phase: Phase, before: Phase | None, rank: int, folder: Path, reference: Reference) -> None:
    torch.manual_seed(7)  # not the reference's seed: equal values must have been restored
    uncut = Model()
    torch.manual_seed(7)
    model = built(phase.kind, phase.world)
    for name, value in plain(model).state_dict().items():
        same(f"{name} as torch cut it", local(value), part(uncut.state_dict()[name], value))
    optimizer = optimizer_of(model)
    data = {"position": -1}
    own = torch.Generator()
    rng = holdfast.RNG(own)
    state = {"model": model, "optim": optimizer, "data": data, "rng": rng}
    with holdfast.Checkpointer(holdfast.Folder(folder, keep_last=2), interval_steps=0) as ckpt:
        step = ckpt.restore(state)
        if before is None:
            assert step is None
            reference.give(model)
        else:
            home = rank % before.world
            assert step == reference.steps
            assert data == {"position": home + 100 * step}
            assert own.initial_seed() == home
            expected = torch.Generator().manual_seed(home)
            torch.rand(home + 1, generator=expected)
            assert torch.equal(torch.rand(3, generator=own), torch.rand(3, generator=expected))
            reference.check(model, optimizer)
        reference.step(model, optimizer)
        reference.check(model, optimizer)
        data["position"] = rank + 100 * reference.steps
        own.manual_seed(rank)
        torch.rand(rank + 1, generator=own)
        ckpt.save(reference.steps, state).wait("local", timeout=HANG_SECONDS)


def phase_process(name: str, number: int, rank: int, folder: Path) -> None:
    phase = SCENARIOS[name][number]
    before = SCENARIOS[name][number - 1] if number else None
    os.environ["WORLD_SIZE"] = str(phase.world)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    where = f"file://{folder}/{name}-{number}.store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=phase.world)
    reference = Reference()
    for _ in range(number):
        twin = Model()
        reference.step(twin, optimizer_of(twin))
    play(phase, before, rank, folder / name, reference)
    dist.destroy_process_group()


def main(folder: Path, rank: int, done: Callable[[str], None]) -> None:
    for name, phases in SCENARIOS.items():
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        for number, phase in enumerate(phases):
            if rank >= phase.world:
                continue  # idle until a phase includes this rank again
            child = os.fork()
            if child == 0:
                faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
                code = 1
                try:
                    phase_process(name, number, rank, folder)
                    code = 0
                finally:
                    if code:
                        traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            assert status == 0, f"{name}, phase {number}: rank {rank} ended with {status}"
        if rank == 0:
            done(name)


def say(name: str) -> None:
    with open(Path(sys.argv[1]) / "done", "a") as file:
        file.write(f"{name}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]), say)
