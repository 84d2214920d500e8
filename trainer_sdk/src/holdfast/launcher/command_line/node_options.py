"""Which nodes a run has, and where their launchers meet: from options, or from srun's environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.launcher.command_line.slurm import slurm_step
from holdfast_core.errors import ConfigError

DEFAULT_PORT = 29400
"""Port of --rdzv-endpoint where none is given, as with torchrun."""
DEFAULT_JOIN_SECONDS = 600.0
ENV_TOKEN = "HOLDFAST_RUN_TOKEN"
"""Secret of all launchers of a run. Only a process that knows it, and the run's id, can join the run."""
MAX_NODES = 4096

_HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%a-z]+\]|[^:\[\]]+)(:(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The nodes of a run, as one of their launchers sees them."""

    count: int = 1
    rank: int = 0
    host: str = ""
    port: int = 0
    run_id: str = ""
    """Identity of the run on all its nodes. "" on a single node, which needs none."""
    join_seconds: float = DEFAULT_JOIN_SECONDS
    """How long nodes wait for each other, at the start and after a node was lost."""
    token: str = field(default="", repr=False)

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class NodeWords:
    """What the command line says about nodes. None: the option is not given."""

    nnodes: str | None = None
    node_rank: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_backend: str | None = None
    rdzv_conf: str | None = None
    master_addr: str | None = None
    master_port: str | None = None
    standalone: bool = False


def node_options(words: NodeWords, env: Mapping[str, str]) -> NodeOptions:
    """Return the nodes of a run. Options count more than srun's variables.

    Raises ConfigError for options that do not fit together, or that are missing.
    """
    if words.rdzv_backend not in (None, "c10d", "static"):
        raise _wrong(
            f"--rdzv-backend {words.rdzv_backend}",
            "c10d or static: the launchers connect to node 0 and need no other service",
        )
    join_seconds = _join_seconds(words.rdzv_conf)
    step = None if words.standalone or _is_complete(words) else slurm_step(env)
    count = _count(words.nnodes) if words.nnodes else 1 if step is None else step.nodes
    if words.standalone and count != 1:
        raise _wrong(f"--nnodes {words.nnodes} with --standalone", "one of them")
    if count == 1:
        if words.node_rank not in (None, "0"):
            raise _wrong(f"--node-rank {words.node_rank} with --nnodes 1", "--node-rank 0")
        return NodeOptions(join_seconds=join_seconds, run_id=words.rdzv_id or "")
    if step is not None and step.nodes != count:
        step = None
    endpoint = _endpoint(words)
    if endpoint is None and step is not None:
        endpoint = step.first_host, step.port
    if endpoint is None:
        raise _missing(count, "--rdzv-endpoint", "HOST:PORT of node 0, the same on all nodes")
    if words.node_rank is None and step is None:
        raise _missing(
            count, "--node-rank", f"a different number from 0 to {count - 1} on each node"
        )
    rank = _whole("--node-rank", words.node_rank) if words.node_rank else step.node_rank  # type: ignore[union-attr]
    if rank >= count:
        raise _wrong(f"--node-rank {rank} with --nnodes {count}", f"0 to {count - 1}")
    token = env.get(ENV_TOKEN, "")
    run_id = words.rdzv_id or ("" if step is None else step.run_id)
    if not run_id and not token:
        raise _missing(
            count,
            "--rdzv-id",
            f"a text that only the launchers of this run know (or {ENV_TOKEN} in their environment), so that "
            "no other process joins the run",
        )
    return NodeOptions(count, rank, *endpoint, run_id or "none", join_seconds, token)


def _is_complete(words: NodeWords) -> bool:
    """Return whether the options say everything, so that srun's variables are not needed."""
    endpoint = words.rdzv_endpoint or words.master_addr
    return bool(words.nnodes and words.node_rank and endpoint and words.rdzv_id)


def _count(text: str) -> int:
    lowest, colon, highest = text.partition(":")
    if colon and lowest != highest:
        raise _wrong(
            f"--nnodes {text}",
            "one number: a run has the same nodes until it ends. Start it again with another number, and "
            "it restores the checkpoint on that number of ranks",
        )
    count = _whole("--nnodes", lowest)
    if not 1 <= count <= MAX_NODES:
        raise _wrong(f"--nnodes {text}", f"1 to {MAX_NODES}")
    return count


def _endpoint(words: NodeWords) -> tuple[str, int] | None:
    """Return host and port from --rdzv-endpoint, or from --master-addr and --master-port."""
    by_master = None
    if words.master_addr:
        host = words.master_addr.strip("[]")
        by_master = host, _port("--master-port", words.master_port or str(DEFAULT_PORT))
    if not words.rdzv_endpoint:
        return by_master
    match = _HOST_AND_PORT.fullmatch(words.rdzv_endpoint)
    if match is None:
        raise _wrong(f"--rdzv-endpoint {words.rdzv_endpoint}", "HOST, HOST:PORT or [IPv6]:PORT")
    port = _port("--rdzv-endpoint", match["port"] or words.master_port or str(DEFAULT_PORT))
    endpoint = match["host"].strip("[]"), port
    if by_master is not None and by_master != endpoint:
        raise _wrong(
            f"--rdzv-endpoint {words.rdzv_endpoint} with --master-addr {words.master_addr}",
            "one of them",
        )
    return endpoint


def _port(name: str, text: str) -> int:
    port = _whole(name, text)
    if not 1 <= port <= 65535:
        raise _wrong(f"{name}: port {text}", "1 to 65535; all nodes must know the port of node 0")
    return port


def _join_seconds(conf: str | None) -> float:
    seconds = DEFAULT_JOIN_SECONDS
    for part in filter(None, (conf or "").split(",")):
        key, _, value = part.partition("=")
        if key.strip() != "join_timeout" or not value.strip().isdecimal():
            raise _wrong(
                f"--rdzv-conf {part}",
                "join_timeout=SECONDS, the only entry that has a meaning here",
            )
        seconds = float(value)
    return seconds


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise _wrong(f"{name} {text}", "a whole number from 0")
    return int(text)


def _wrong(what: str, expected: str) -> ConfigError:
    return ConfigError(f"holdfast run: {what}: expected {expected}")


def _missing(count: int, name: str, expected: str) -> ConfigError:
    return ConfigError(f"holdfast run: --nnodes {count} needs {name}: {expected}")
