"""A small GPT on real text whose training survives kills and ends bit-identical to a run without any.

Deterministic on purpose: byte-level tokens, a sampler that is part of the checkpoint, dropout on, AdamW,
a learning-rate schedule, DistributedDataParallel over gloo. Runs under `holdfast run` in a worker pod, or
on one machine:

    holdfast run --nproc-per-node 2 --max-restarts 10 -- python train.py --dir ckpt --steps 200
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import holdfast

VOCABULARY = 256
SEQUENCE = 64
CORPUS = Path(__file__).with_name("corpus.txt")


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=rate
        )
        mixed = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + functional.dropout(mixed, self.dropout, self.training)
        hidden = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + functional.dropout(hidden, self.dropout, self.training)


class GPT(nn.Module):
    """Returns the loss of predicting `targets` from `tokens`."""

    def __init__(self, layers: int, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Batches:
    """Windows of the corpus in an order that each epoch shuffles; knows where it is.

    A Stateful: what is saved is the epoch and the position in it, so a resumed run repeats and skips
    no window.
    """

    def __init__(self, data: torch.Tensor, batch: int, rank: int, world_size: int) -> None:
        self.data = data
        self.batch = batch
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.position = 0
        self._order = self._shuffled()

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        stride = self.batch * self.world_size
        if self.position + stride > len(self._order):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._shuffled()
        start = self.position + self.rank * self.batch
        self.position += stride
        windows = [
            self.data[i : i + SEQUENCE + 1]
            for i in self._order[start : start + self.batch].tolist()
        ]
        block = torch.stack(windows).long()
        return block[:, :-1], block[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 + self.epoch)
        starts = torch.arange(0, len(self.data) - SEQUENCE - 1, SEQUENCE // 2)
        return starts[torch.randperm(len(starts), generator=generator)]


def digest(value: Any) -> str:
    """SHA-256 over every bit of a nested state; dict keys in a fixed order."""
    hasher = hashlib.sha256()

    def feed(item: Any, path: str) -> None:
        hasher.update(path.encode())
        if isinstance(item, torch.Tensor):
            hasher.update(f"{item.dtype}{tuple(item.shape)}".encode())
            hasher.update(item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(item, dict):
            for key in sorted(item, key=repr):
                feed(item[key], f"{path}/{key!r}")
        elif isinstance(item, list | tuple):
            for index, entry in enumerate(item):
                feed(entry, f"{path}/{index}")
        elif hasattr(item, "tobytes"):
            hasher.update(item.tobytes())
        else:
            hasher.update(repr(item).encode())

    feed(value, "")
    return hasher.hexdigest()


def seed(number: int) -> None:
    """All three generators: what is not seeded differs in every run."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def note_progress(file: Path, steps: int) -> None:
    """Replace the file in one step: a program that reads it never finds a part of its text."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(f"{steps} {os.getpid()}\n")
    new.replace(file)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="windows a step and rank")
    parser.add_argument("--state-mib", type=int, default=0, help="ballast, to reach a state size")
    parser.add_argument("--sleep-per-step", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--dir", help="checkpoints, outside of a worker pod")
    parser.add_argument("--interval", type=int, help="steps between saves, with --dir")
    parser.add_argument("--final-digest", metavar="PATH", help="file to append to, or -")
    parser.add_argument(
        "--progress-dir", metavar="DIR", help="write each rank's steps and process id there"
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    holdfast.pin_threads(1)
    torch.use_deterministic_algorithms(True)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")

    torch.manual_seed(1)
    model: nn.Module = GPT(arguments.layers, arguments.width)
    plain = model
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * min(step, 2000) / 2000))
        ),
    )
    data = torch.frombuffer(bytearray(CORPUS.read_bytes()), dtype=torch.uint8)
    batches = Batches(data, arguments.batch, rank, world_size)
    example = torch.zeros(arguments.batch, SEQUENCE, dtype=torch.long)
    seed(100 + rank)  # every rank its own dropout
    holdfast.warm_up(model, optimizer, lambda: model(example, example))

    state: dict[str, Any] = {
        "model": model,
        "optim": optimizer,
        "sched": schedule,
        "data": batches,
        "rng": holdfast.RNG(),
    }
    if arguments.state_mib:
        state["ballast"] = torch.zeros(arguments.state_mib << 18)
    with holdfast.Checkpointer(dir=arguments.dir, interval_steps=arguments.interval) as ckpt:
        for step in ckpt.steps(arguments.steps, state):
            loss = model(*batches.next())
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            if arguments.state_mib:
                state["ballast"].add_(1.0)
            ckpt.report(loss=loss)
            if arguments.sleep_per_step:
                time.sleep(arguments.sleep_per_step)
            if arguments.progress_dir:
                note_progress(Path(arguments.progress_dir, f"rank{rank}"), step + 1)
        finished = not ckpt.stopping

    if arguments.final_digest and finished:
        held = {key: getattr(part, "state_dict", lambda p=part: p)() for key, part in state.items()}
        held["model"] = plain.state_dict()
        text = json.dumps({"finalDigest": digest(held), "rank": rank, "step": arguments.steps})
        if arguments.final_digest == "-":
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        else:
            with open(arguments.final_digest, "a") as file:
                file.write(text + "\n")
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
