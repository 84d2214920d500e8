"""Mutants of the operator's decisions."""

from __future__ import annotations

from tools.mutants.model import Kind, Mutant

_DECIDE = "operator/src/holdfast_operator/decide/"
_STORE_RETENTION = "core/src/holdfast_core/store_retention.py"
_TESTS = "tests/operator/decide/"
_READABLE = (f"{_TESTS}facts/test_readable.py",)
_POINT = (f"{_TESTS}test_restore_point.py",)
_START_OVER = (f"{_TESTS}test_start_over.py",)
_LOST_STATUS = ("tests/operator/lives/test_lost_status.py",)

OF_DECIDE = (
    Mutant(
        name="decide/copies-of-an-older-round",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}facts/readable.py",
        original="    if not _of_round(world.state.last_replicated, world):",
        replacement="    if world.state.last_replicated is None:",
        loses="A pod is replaced although its node has the only copy of a shard.",
        tests=_READABLE,
    ),
    Mutant(
        name="decide/commit-that-is-not-reported-yet",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}facts/readable.py",
        original=(
            "    if any(i.round == world.round for m in answered for i in _manifests(m)):\n"
            "        return False"
        ),
        replacement="    if False:\n        return False",
        loses="Silent pods are replaced although they may hold a step of this round.",
        tests=_READABLE,
    ),
    Mutant(
        name="decide/more-lost-than-copies",
        kind=Kind.OFF_BY_ONE,
        file=f"{_DECIDE}facts/readable.py",
        original="return len(away) <= world.copies",
        replacement="return len(away) <= world.copies + 1",
        loses="Two pods are replaced that hold a shard and its only copy.",
        tests=_READABLE,
    ),
    Mutant(
        name="decide/newest-step-is-not-replicated",
        kind=Kind.COMPARISON,
        file=f"{_DECIDE}facts/readable.py",
        original="return copied is not None and copied >= newest and _survives_by_copies",
        replacement="return copied is not None and _survives_by_copies",
        loses="A pod is replaced before its newest step has a copy.",
        tests=_READABLE,
    ),
    Mutant(
        name="decide/persisted-step-is-older",
        kind=Kind.COMPARISON,
        file=f"{_DECIDE}facts/readable.py",
        original=(
            "    if persisted is not None and persisted.step >= newest:\n"
            "        return True\n"
            "    return copied"
        ),
        replacement="    if persisted is not None:\n        return True\n    return copied",
        loses="A pod is replaced although only an older step is in the store.",
        tests=_READABLE,
    ),
    Mutant(
        name="decide/coordinator-is-silent",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}facts/readable.py",
        original=(
            "    if coordinator.worker not in {m.worker for m in answered}:\n        return False\n"
        ),
        replacement="",
        loses="Pods are replaced on the word of a coordinator that may have committed since.",
        tests=_READABLE,
    ),
    Mutant(
        name="decide/inventory-from-before-the-seal",
        kind=Kind.COMPARISON,
        file=f"{_DECIDE}facts/readable.py",
        original="and sidecar.inventory.round >= world.round",
        replacement="and sidecar.inventory.round >= world.round - 1",
        loses="The gang restarts from an older step than the one that was committed last.",
        tests=_POINT,
    ),
    Mutant(
        name="decide/shard-of-another-digest",
        kind=Kind.MISSING_DIGEST,
        file=f"{_DECIDE}facts/readable.py",
        original="(candidate.id, s.rank, s.blake3) in known for s in info.shards",
        replacement="any(k[:2] == (candidate.id, s.rank) for k in known) for s in info.shards",
        loses="A step is chosen whose shard no node has, and every restart fails.",
        tests=_POINT,
    ),
    Mutant(
        name="decide/interrupted-commit-counts",
        kind=Kind.COMPARISON,
        file=f"{_DECIDE}facts/readable.py",
        original="shared = own if index == 0 else shared & own",
        replacement="shared = own if index == 0 else shared | own",
        loses="The gang waits for ever for a step whose commit was interrupted.",
        tests=_POINT,
    ),
    Mutant(
        name="decide/checkpoint-of-another-job",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}facts/readable.py",
        original="        and status.job_uid == job.uid\n",
        replacement="",
        loses="A job restores the checkpoint of a former job of the same name.",
        tests=_POINT,
    ),
    Mutant(
        name="decide/quarantined-checkpoint-is-restored",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}facts/readable.py",
        original="or info.round >= world.round or id_ in apart:",
        replacement="or info.round >= world.round:",
        loses="The gang restores a broken checkpoint again and again, until its restarts are used up.",
        tests=(f"{_TESTS}test_quarantine.py::test_the_newest_that_is_not_quarantined_is_chosen",),
    ),
    Mutant(
        name="decide/laxer-merge-of-the-lineage",
        kind=Kind.SWAPPED_WRITES,
        file=f"{_DECIDE}restore_point.py",
        original="kept[:2] = [changed(lower, round=second.round)]",
        replacement="kept[:2] = [second]",
        loses="After 64 restarts, steps that were trained again are restored in place of the newer ones.",
        tests=_POINT,
    ),
    Mutant(
        name="decide/no-survivor-has-answered",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}restore_point.py",
        original="    if not survivors:\n        return",
        replacement="    if survivors is None:\n        return",
        loses="A restart during a network failure gives up the newest step.",
        tests=_POINT,
    ),
    Mutant(
        name="decide/wait-begins-before-the-first-answer",
        kind=Kind.COMPARISON,
        file=f"{_DECIDE}restore_point.py",
        original="seconds_since(max(memory.round_seen_at, answering_since))",
        replacement="seconds_since(min(memory.round_seen_at, answering_since))",
        loses="Right after a long network failure, the first answer decides without the others.",
        tests=_POINT,
    ),
    Mutant(
        name="decide/job-starts-over",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}restore_point.py",
        original=(
            "    committed = readable.recorded_commit(world)\n    if committed is not None:\n"
        ),
        replacement=(
            "    committed = readable.recorded_commit(world)\n"
            "    if committed is not None and committed < 0:\n"
        ),
        loses="A job whose shards cannot be read now starts from step 0 without a question.",
        tests=_START_OVER,
    ),
    Mutant(
        name="decide/start-over-of-any-length",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}facts/rollback.py",
        original=" and limit > 0 and lost.seconds <= limit",
        replacement=" and limit > 0",
        loses="A job that trained for days starts over without a question.",
        tests=_START_OVER,
    ),
    Mutant(
        name="decide/start-over-is-confirmed-for-good",
        kind=Kind.MISSING_CHECK,
        file="core/src/holdfast_core/api/training_job.py",
        original="bool(lineage) and lineage[-1].round == self.round",
        replacement="bool(lineage)",
        loses="One command gives up all later histories of the job, too.",
        tests=_START_OVER,
    ),
    Mutant(
        name="decide/rollback-to-a-missing-checkpoint",
        kind=Kind.MISSING_CHECK,
        file="core/src/holdfast_core/rollback.py",
        original="    if id_ in status.missing:",
        replacement="    if False:",
        loses="A gang that trains is stopped for a checkpoint that no place has.",
        tests=(f"{_TESTS}test_rollback.py",),
    ),
    Mutant(
        name="decide/a-lost-status-repeats-a-round",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}failures.py",
        original="    saved = world.highest_saved if world.status.restore_point is None else None",
        replacement="    saved = None",
        loses="A job whose status was lost writes under the keys of an earlier round.",
        tests=_LOST_STATUS,
    ),
    Mutant(
        name="decide/a-lost-status-is-a-new-job",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}facts/readable.py",
        original="    return abs(started - world.job.created_at) > NEW_JOB",
        replacement="    return False",
        loses="A job whose status was lost starts from step 0, although the store has its checkpoints.",
        tests=_LOST_STATUS,
    ),
    Mutant(
        name="decide/a-clone-needs-no-grant-to-keep-its-source",
        kind=Kind.MISSING_CHECK,
        file="operator/src/holdfast_operator/watch/cache.py",
        original="if g.namespace == namespace or self.is_granted(g, namespace)",
        replacement="if g.namespace",
        loses="A tenant fills the store of another one by naming its Checkpoints.",
        tests=("tests/operator/loop/test_observed_sources.py",),
    ),
    Mutant(
        name="decide/a-restore-outlives-its-grant",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}failures.py",
        original="    if foreign is None or foreign.granted or point is None or point.job_uid is None:",
        replacement="    if foreign is None or point is not None:",
        loses="A clone goes on reading what its owner has taken back.",
        tests=("tests/operator/decide/test_foreign_sources.py",),
    ),
    Mutant(
        name="decide/start-over-without-the-store",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}restore_point.py",
        original="    return best is None and not readable.nothing_committed(world, answered)",
        replacement="    return False",
        loses="A job whose store is down starts over, although the store has a checkpoint.",
        tests=_START_OVER,
    ),
    Mutant(
        name="decide/implied-by-a-higher-base",
        kind=Kind.COMPARISON,
        file=f"{_DECIDE}restore_point.py",
        original="return _base(old) == _base(new) or (_base(old) > _base(new)",
        replacement="return _base(old) == _base(new) or (_base(old) < _base(new)",
        loses="A step that was trained again is restored in place of the newer one.",
        tests=_POINT,
    ),
    Mutant(
        name="decide/one-failure-too-many-quarantines",
        kind=Kind.OFF_BY_ONE,
        file=f"{_DECIDE}facts/evidence.py",
        original="if counts[failed_from] < policy.quarantine_after or",
        replacement="if counts[failed_from] <= policy.quarantine_after or",
        loses="A broken checkpoint costs one restart more than failurePolicy says.",
        tests=(
            f"{_TESTS}test_quarantine.py::test_the_next_older_one_is_taken_after_three_failures",
        ),
    ),
    Mutant(
        name="decide/released-step-stays-quarantined",
        kind=Kind.MISSING_CHECK,
        file=_STORE_RETENTION,
        original="return frozenset(q for q in gang.status.quarantined if q.step not in released)",
        replacement="return frozenset(gang.status.quarantined)",
        loses="A step that the user has released is not restored.",
        tests=(
            f"{_TESTS}test_quarantine.py::test_a_released_one_is_chosen_before_the_status_is_written",
        ),
    ),
    Mutant(
        name="decide/one-restart-too-many",
        kind=Kind.OFF_BY_ONE,
        file=f"{_DECIDE}facts/evidence.py",
        original="return restarts >= world.spec.failure_policy.max_restarts",
        replacement="return restarts > world.spec.failure_policy.max_restarts",
        loses="A job restarts once more than maxRestarts.",
        tests=(f"{_TESTS}test_decide_failures.py::test_restart_budget",),
    ),
    Mutant(
        name="decide/no-back-off",
        kind=Kind.COMPARISON,
        file=f"{_DECIDE}facts/evidence.py",
        original="if futile < FREE_RESTARTS:",
        replacement="if futile <= FREE_RESTARTS + 64:",
        loses="A job that fails at once uses up its restarts within seconds.",
        tests=(f"{_TESTS}test_back_off.py::test_each_futile_restart_waits_longer",),
    ),
    Mutant(
        name="decide/prune-before-a-commit-of-the-round",
        kind=Kind.COMPARISON,
        file=f"{_DECIDE}checkpoints.py",
        original="of_round = any(p is not None and p.round == world.round for p in points)",
        replacement="of_round = any(p is not None for p in points)",
        loses="Old checkpoints leave the store before the restarted gang has saved anything.",
        tests=(f"{_TESTS}test_decide_checkpoints.py::test_retention",),
    ),
    Mutant(
        name="decide/pinned-checkpoint-is-pruned",
        kind=Kind.MISSING_CHECK,
        file=_STORE_RETENTION,
        original="for id_, c in known if c.spec.pin]",
        replacement="for id_, c in known if c.deleting]",
        loses="A checkpoint that the user has pinned is deleted from the store.",
        tests=(f"{_TESTS}test_decide_checkpoints.py::test_retention",),
    ),
    Mutant(
        name="decide/restore-point-is-deleted",
        kind=Kind.MISSING_CHECK,
        file=_STORE_RETENTION,
        original="RetentionReason.RESTORE_POINT: of_steps([] if start is None else [start]) | back,",
        replacement="RetentionReason.RESTORE_POINT: back,",
        loses="The checkpoint from which the gang has started is deleted from the store.",
        tests=(f"{_TESTS}test_decide_checkpoints.py::test_retention",),
    ),
    Mutant(
        name="decide/source-of-a-clone-is-pruned",
        kind=Kind.MISSING_CHECK,
        file=_STORE_RETENTION,
        original="for id_, c in known if c.name in cloned]",
        replacement="for id_, c in known if c.name in ()]",
        loses="The checkpoint from which another job starts is deleted while that job needs it.",
        tests=(f"{_TESTS}test_decide_checkpoints.py::test_retention",),
    ),
    Mutant(
        name="decide/commit-before-the-record-of-the-last-one",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}checkpoints.py",
        original=(
            "    if last is not None and not has_object(world, last.id):\n"
            "        return None\n"
            "    return pending_commit(world)"
        ),
        replacement="    return pending_commit(world)",
        loses="A persisted checkpoint has no Checkpoint object, so that nothing ever deletes it.",
        tests=(f"{_TESTS}test_decide_checkpoints.py::test_commit",),
    ),
    Mutant(
        name="decide/pod-of-a-newer-round-is-deleted",
        kind=Kind.COMPARISON,
        file=f"{_DECIDE}facts/world.py",
        original="if round_ is None or pod.birth_round > round_:",
        replacement="if round_ is None or pod.birth_round > round_ + 64:",
        loses="An operator with an old status deletes the pods of the running gang.",
        tests=(f"{_TESTS}test_readability.py::test_a_pod_of_a_higher_round_is_never_deleted",),
    ),
    Mutant(
        name="decide/pinned-data-of-a-deleted-job",
        kind=Kind.MISSING_CHECK,
        file=f"{_DECIDE}deletions.py",
        original="kept = {c.name for c in objects if c.spec.pin or c.name in cloned}",
        replacement="kept = {c.name for c in objects if c.name in cloned}",
        loses="The data of a pinned checkpoint is deleted with its job.",
        tests=(
            "tests/operator/lives/test_deletions.py::"
            "test_pinned_and_cloned_ones_stay_as_long_as_that_is_so",
        ),
    ),
    Mutant(
        name="decide/data-of-a-job-that-only-the-server-knows",
        kind=Kind.MISSING_CHECK,
        file="operator/src/holdfast_operator/loop/deletions.py",
        original="if await self.cluster.job_exists(store.namespace, estate.job, estate.job_uid):",
        replacement="if False:",
        loses="A watch that lags costs a job all of its checkpoints.",
        tests=(
            "tests/operator/lives/test_deletions.py::"
            "test_a_job_that_only_the_api_server_knows_keeps_its_data",
        ),
    ),
)
