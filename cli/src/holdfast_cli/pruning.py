"""`prune`: show and delete what a retention does not keep, of a job, a folder or a store.

Of a job, the command plans with the operator's own function and deletes no data itself: it sets
deletionPolicy DeleteData and the finalizer of a Checkpoint, and deletes the object. The operator then has the
data deleted. It keeps the data of a checkpoint that something needs meanwhile. A folder or a store is pruned
by this process.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from holdfast.reading.opening import Checkpoints, open_checkpoints
from holdfast.reading.pruning import PrunePlan
from holdfast_cli.errors import CommandError, NotFound, StateError, UsageError
from holdfast_cli.gangs import parsed
from holdfast_cli.options import Session, common_options, target_argument, yes_option
from holdfast_cli.output import Column, Format, Result, Table, say, show
from holdfast_cli.places import place_of
from holdfast_cli.progress import ByteProgress, bytes_text
from holdfast_cli.question import confirm
from holdfast_cli.targets import ClusterTarget, Kind, PlaceTarget, Target, named, without_step
from holdfast_core.api import (
    GANGS,
    Checkpoint,
    DeletionPolicy,
    Gang,
    JobPhase,
    changed,
    parse_duration,
    size_text,
)
from holdfast_core.clock import SystemClock, stamp
from holdfast_core.errors import ConfigError
from holdfast_core.ids import JobUid
from holdfast_core.retention import (
    EXPLAINED,
    BestMode,
    KeepBest,
    RetentionPolicy,
    RetentionReason,
)
from holdfast_core.sources import NoSource, find_source
from holdfast_core.store_retention import cloned_of, plan_store, pruned_by

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient

INSTEAD = "A store is pruned by its URL"
_LEAST_KEPT = 2
"""If the newest checkpoint cannot be read, an older one is needed."""
_BEST = re.compile(r"(?P<metric>[^:]+)(:(?P<mode>min|max))?(:(?P<count>[0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class Pruned:
    """A Checkpoint object that is to be deleted with its data."""

    checkpoint: Checkpoint
    reason: RetentionReason


@dataclass(frozen=True, slots=True)
class Pruning:
    """What a prune of a job deletes and keeps."""

    prune: tuple[Pruned, ...]
    """The newest step first."""
    kept: Mapping[RetentionReason, int]
    """Number of the checkpoints that stay, by the reason."""

    @property
    def bytes(self) -> int:
        return sum(p.checkpoint.status.bytes or 0 for p in self.prune)

    @property
    def summary(self) -> str:
        """Return one sentence about the whole plan."""
        return summary(len(self.prune), self.bytes, self.kept)


def summary(number: int, size_bytes: int, kept: Mapping[RetentionReason, int]) -> str:
    """Return one sentence about a plan.

    Args:
        number: Number of checkpoints that it deletes.
        size_bytes: Their bytes.
        kept: Number of the checkpoints that stay, by the reason.
    """
    reasons = ", ".join(f"{count} {EXPLAINED[reason]}" for reason, count in kept.items())
    return (
        f"prune {number} checkpoint{'' if number == 1 else 's'} ({size_text(size_bytes)}), "
        f"keep {sum(kept.values())}{f': {reasons}' if reasons else ''}"
    )


def parse_gang(raw: Mapping[str, Any]) -> Gang:
    kind = next(kind for kind in GANGS if raw["kind"] == kind.KIND)
    return parsed(kind, raw)


def plan_pruning(
    gang: Gang,
    checkpoints: Sequence[Checkpoint],
    gangs: Sequence[Gang],
    now: datetime,
    *,
    keep_last: int | None = None,
) -> Pruning:
    """Return what the retention of a job prunes from the object store.

    Args:
        checkpoints: The Checkpoints of the namespace, of any job.
        gangs: All gangs of the namespace. Some may start from a checkpoint of the job. The operator also
            knows those of other namespaces that have a CheckpointGrant, and keeps what they need.
        keep_last: Number of newest checkpoints, in place of the job's.
    """
    if keep_last is not None:
        spec = gang.spec
        retention = changed(spec.checkpoint.retention, keep_last=keep_last)
        policy = changed(spec.checkpoint, retention=retention)
        gang = gang.model_copy(update={"spec": changed(spec, checkpoint=policy)})
    uid = JobUid(gang.metadata.uid)
    own = [c for c in checkpoints if c.job == gang.name and c.status.job_uid == uid]
    clones = [g for g in gangs if g.spec.source_namespace(g.namespace) == gang.namespace]
    named = {other.name: other for other in gangs}

    def source_of(other: Gang) -> Checkpoint | NoSource:
        return find_source(other, checkpoints, named.get(other.spec.source_job or ""))

    plan = plan_store(gang, own, cloned_of(clones, uid, source_of), now)
    doomed = [Pruned(checkpoint, reason) for checkpoint, reason in pruned_by(plan, own)]
    doomed.sort(key=lambda p: p.checkpoint.spec.step or 0, reverse=True)
    return Pruning(tuple(doomed), Counter(verdict.reason for verdict in plan.keep))


def pruning_table(pruning: Pruning) -> Table:
    """Return the table of what is pruned."""
    rows = [
        (p.checkpoint.name, size_text(p.checkpoint.status.bytes), EXPLAINED[p.reason])
        for p in pruning.prune
    ]
    return Table(["CHECKPOINT", Column("SIZE", right=True), "REASON"], rows)


def pruning_document(pruning: Pruning) -> dict[str, Any]:
    """Return the plan as JSON: names, bytes and reasons as the API spells them."""
    return {
        "prune": [
            {
                "checkpoint": p.checkpoint.name,
                "bytes": p.checkpoint.status.bytes,
                "reason": p.reason.value,
            }
            for p in pruning.prune
        ],
        "bytes": pruning.bytes,
        "kept": {reason.value: number for reason, number in pruning.kept.items()},
    }


def why_not(gang: Gang) -> str | None:
    """Return why no data of the job can be deleted now, or None.

    Its sidecars delete while it trains, and a pod of the store does it while the job has no gang.
    """
    phase = gang.status.phase
    ended = gang.status.completion_time is not None
    if ended or phase in (JobPhase.RUNNING, JobPhase.SUSPENDED):
        return None
    return (
        f"{gang.name} is {phase or 'not started'}: its data in the object store can be deleted when it "
        "trains, is suspended or is over"
    )


def with_data(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the patch after which a deletion of the object deletes the data as well."""
    added = () if checkpoint.has_finalizer else (Checkpoint.FINALIZER,)
    return {
        "metadata": {
            "finalizers": [*checkpoint.metadata.finalizers, *added],
            "resourceVersion": checkpoint.metadata.resource_version,
        },
        "spec": {"deletionPolicy": DeletionPolicy.DELETE_DATA.value},
    }


@click.command(
    "prune",
    help="Show which checkpoints a retention does not keep, with their sizes and the reasons, and delete "
    "them after a question. Of a job these are the checkpoints in the object store that "
    "spec.checkpoint.retention does not keep. Of a folder or a store the options say what stays: a "
    "checkpoint that any of them keeps. The newest one that can be read always stays, and in a folder what "
    "is pinned, read or waits for its upload.",
)
@target_argument(Kind.JOB)
@click.option("--dry-run", is_flag=True, help="Show the plan and delete nothing.")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Keep N newest checkpoints. Default beside other rules: {_LEAST_KEPT}. Of a job it replaces "
    f"retention.keepLast, and is at least {_LEAST_KEPT}.",
)
@click.option(
    "--keep-every",
    metavar="STEPS|TIME",
    help="Keep the first checkpoint of each so many steps (1000) or of each such time (6h).",
)
@click.option("--keep-for", metavar="TIME", help="Keep checkpoints for this time (48h).")
@click.option(
    "--hourly",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Keep the newest checkpoint of each of the last N hours that have one (UTC).",
)
@click.option(
    "--daily",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Keep the newest checkpoint of each of the last N days that have one (UTC).",
)
@click.option(
    "--keep-best",
    metavar="METRIC[:min|max][:N]",
    help="Keep the N checkpoints (1) with the lowest (min) or highest values of a metric that the script "
    "reported.",
)
@click.option(
    "--training-is-over",
    is_flag=True,
    help="Nothing is saved in the store any more, by no job of a cluster and no run of a folder: also prune "
    "the checkpoints of a TrainingJob, and remove what interrupted uploads have left.",
)
@yes_option
@common_options
@click.pass_obj
def command(
    session: Session,
    target: Target,
    dry_run: bool,
    keep_last: int | None,
    keep_every: str | None,
    keep_for: str | None,
    hourly: int,
    daily: int,
    keep_best: str | None,
    training_is_over: bool,
    yes: bool,
) -> None:
    rules = Rules(keep_last, keep_every, keep_for, hourly, daily, keep_best)
    consent = Consent(dry_run, yes, training_is_over)
    if not isinstance(target, ClusterTarget):
        prune_place(place_of(session, target), rules.policy(), session.format, consent)
        return
    job = without_step(named(target, "prune", (Kind.JOB,), INSTEAD), "prune").name
    rules.expect_of_job()
    if training_is_over:
        raise UsageError("--training-is-over is for a store: the cluster knows what its jobs do")
    prune_store(
        session.cluster(), job, session.format, keep_last=keep_last, dry_run=dry_run, yes=yes
    )


def prune_store(
    cluster: ClusterClient,
    job: str,
    format: Format = Format.TABLE,
    *,
    keep_last: int | None = None,
    dry_run: bool = False,
    yes: bool = False,
) -> None:
    """Show the plan of a job, and delete what it names after a question."""
    gang = parse_gang(cluster.gang(job))
    checkpoints = [parsed(Checkpoint, c) for c in cluster.items("checkpoints")]
    gangs = [parse_gang(raw) for raw in cluster.gangs()]
    pruning = plan_pruning(gang, checkpoints, gangs, SystemClock().utc_now(), keep_last=keep_last)
    table = [pruning_table(pruning)] if pruning.prune else []
    show(Result(pruning_document(pruning), [*table, pruning.summary]), format)
    obstacle = why_not(gang)
    if dry_run or not pruning.prune:
        if obstacle is not None and pruning.prune:
            say(f"note: {obstacle}")
        return
    if obstacle is not None:
        raise StateError(f"nothing was deleted: {obstacle}")
    if not yes:
        confirm_deletion(len(pruning.prune))
    deleted = 0
    for pruned in pruning.prune:
        item = pruned.checkpoint
        try:
            cluster.delete_with("checkpoints", item.name, item.uid, with_data(item))
        except NotFound:
            continue  # the retention of the job has deleted it meanwhile
        except CommandError as error:
            raise CommandError(
                f"{error}. {deleted} of {len(pruning.prune)} checkpoints are being deleted; repeat the "
                "command for the others"
            ) from error
        deleted += 1
    say("the operator deletes them now; their objects go when the data is gone")


def confirm_deletion(number: int) -> None:
    """Ask before checkpoints are deleted. Raises as `confirm` does."""
    confirm(
        f"delete the data of {number} checkpoint{'' if number == 1 else 's'}? It cannot be undone.",
        refused="nothing was deleted",
        no_terminal="nothing was deleted: there is no terminal to ask on. Add --yes to delete what the plan "
        "names, or --dry-run to see the plan only",
    )


# --------------------------------------------------------------------------- a folder or a store


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of the command line. A checkpoint stays if any of them keeps it."""

    keep_last: int | None = None
    keep_every: str | None = None
    keep_for: str | None = None
    hourly: int = 0
    daily: int = 0
    keep_best: str | None = None

    def policy(self) -> RetentionPolicy:
        """Return the policy. Raises UsageError without any rule, and for one that cannot be read."""
        if self == Rules():
            raise UsageError(
                "prune of a folder or a store needs at least one rule, as in --keep-last 3: --keep-last, "
                "--keep-every, --keep-for, --hourly, --daily or --keep-best"
            )
        every = self.keep_every
        is_steps = every is not None and every.isdecimal()
        if is_steps and int(every or 0) < 1:
            raise UsageError(f"--keep-every {every}: expected at least one step")
        return RetentionPolicy(
            _LEAST_KEPT if self.keep_last is None else self.keep_last,
            int(every or 0) if is_steps else None,
            None if every is None or is_steps else _duration("--keep-every", every),
            None if self.keep_for is None else _duration("--keep-for", self.keep_for),
            self.hourly,
            self.daily,
            None if self.keep_best is None else _best(self.keep_best),
        )

    def expect_of_job(self) -> None:
        """Raise UsageError for rules that a job has in its spec only."""
        if replace(self, keep_last=None) != Rules():
            raise UsageError(
                "a job is pruned by spec.checkpoint.retention: only --keep-last replaces a rule of it; edit "
                "the spec for the others"
            )
        if self.keep_last is not None and self.keep_last < _LEAST_KEPT:
            raise UsageError(
                f"--keep-last {self.keep_last}: a job keeps at least {_LEAST_KEPT}, because an older one is "
                "needed if the newest cannot be read"
            )


def _duration(option: str, text: str) -> timedelta:
    try:
        found = parse_duration(text)
    except ConfigError as error:
        raise UsageError(f"{option}: {error}") from error
    if not found:
        raise UsageError(f"{option} {text}: expected more than 0")
    return found


def _best(text: str) -> KeepBest:
    match = _BEST.fullmatch(text)
    if match is None or match["count"] == "0":
        raise UsageError(
            f"--keep-best {text}: expected METRIC, METRIC:max or METRIC:min:COUNT, as in loss:min:3"
        )
    return KeepBest(match["metric"], BestMode(match["mode"] or "min"), int(match["count"] or 1))


@dataclass(frozen=True, slots=True)
class Consent:
    """What the command line agrees to."""

    dry_run: bool = False
    yes: bool = False
    training_is_over: bool = False


def prune_place(
    target: PlaceTarget, policy: RetentionPolicy, format: Format, consent: Consent
) -> None:
    """Show the plan of a folder or a store, and delete what it names after a question."""
    if target.step is not None:
        raise UsageError(f"prune does not take a step: omit @{target.step}")
    with open_checkpoints(target.place) as found:
        plan = found.plan_prune(policy)
        show(plan_result(plan), format)
        obstacle = obstacle_to_prune(found)
        if consent.dry_run or not plan.prune:
            if obstacle is not None and plan.prune and not consent.training_is_over:
                say(f"note: {obstacle}")
            return
        if obstacle is not None and not consent.training_is_over:
            raise StateError(f"nothing was deleted: {obstacle}")
        if not consent.yes:
            confirm_deletion(len(plan.prune))
        with ByteProgress("deleting") as progress:
            stayed = found.prune(
                plan,
                lambda one: progress.advance(one.checkpoint.stored_bytes, plan.stored_bytes),
            )
        swept = found.sweep() if consent.training_is_over else 0
    for one in stayed:
        say(f"step {one.checkpoint.step} stays: {EXPLAINED[one.reason]}")
    count = len(plan.prune) - len(stayed)
    left = f", and {bytes_text(swept)} that no checkpoint needed" if swept else ""
    say(f"deleted {count} checkpoint{'' if count == 1 else 's'}{left}")


def obstacle_to_prune(found: Checkpoints) -> str | None:
    """Return why the checkpoints are not for this process to delete, or None."""
    job = found.job_name()
    if job is None:
        return None
    return (
        f"{found.name} is of the TrainingJob {job}, and its cluster knows what jobs, clones and restores "
        f"still need: `kubectl holdfast prune {job.rpartition('/')[2]} -n {job.partition('/')[0]}` deletes "
        "there. Where the job and all that start from it are gone, --training-is-over deletes here"
    )


def plan_result(plan: PrunePlan) -> Result:
    """Return what is shown of a plan."""
    rows = [
        (
            one.checkpoint.step,
            one.checkpoint.round,
            stamp(one.checkpoint.saved_at),
            bytes_text(one.checkpoint.stored_bytes),
            EXPLAINED[one.reason],
        )
        for one in plan.prune
    ]
    columns: list[Column | str] = [
        Column("STEP", right=True),
        Column("ROUND", right=True),
        "SAVED",
        Column("SIZE", right=True),
        "REASON",
    ]
    kept = Counter(one.reason for one in plan.keep)
    document = {
        "prune": [
            {
                "step": one.checkpoint.step,
                "round": one.checkpoint.round,
                "bytes": one.checkpoint.stored_bytes,
                "reason": one.reason.value,
            }
            for one in plan.prune
        ],
        "bytes": plan.stored_bytes,
        "kept": {reason.value: number for reason, number in kept.items()},
    }
    table = [Table(columns, rows)] if rows else []
    return Result(document, [*table, summary(len(rows), plan.stored_bytes, kept)])
