"""Mutants of the object tier, and of the store in a directory."""

from __future__ import annotations

from tools.mutants.model import Kind, Mutant

_STORE = "core/src/holdfast_core/store/"
_TESTS = "tests/core/store/"
_COMMIT = (f"{_TESTS}test_store_commit.py",)
_DURABLE = (f"{_TESTS}test_directory_durability.py",)
_PRUNE = (f"{_TESTS}test_object_prune.py",)
_CONFLICTS = (f"{_TESTS}test_tier_conflicts.py",)
_RETRY = (f"{_TESTS}test_retry.py",)
_USAGE = (
    f"{_TESTS}test_usage.py",
    f"{_TESTS}test_interleavings.py::test_a_sweep_of_the_store_and_a_save_stop_at_any_request",
)
_PARTS = (f"{_TESTS}test_part_sizes.py",)

OF_STORE = (
    Mutant(
        name="store/manifest-deleted-last",
        kind=Kind.SWAPPED_WRITES,
        file=f"{_STORE}tier.py",
        original=(
            "        self.delete([keys.manifest_key(checkpoint)])\n"
            "        self._release(checkpoint)\n"
            "        if not self._needed_by(checkpoint):\n"
            "            self.delete_below(keys.shards_prefix(checkpoint))\n"
        ),
        replacement=(
            "        self._release(checkpoint)\n"
            "        if not self._needed_by(checkpoint):\n"
            "            self.delete_below(keys.shards_prefix(checkpoint))\n"
            "        self.delete([keys.manifest_key(checkpoint)])\n"
        ),
        loses="A kill during the deletion leaves a checkpoint in the store whose shards are gone.",
        tests=(
            f"{_TESTS}test_interleavings.py::test_two_deletions_and_a_commit_stop_at_any_request",
        ),
    ),
    Mutant(
        name="store/needed-shards-are-deleted",
        kind=Kind.MISSING_CHECK,
        file=f"{_STORE}tier.py",
        original="        if not self._needed_by(checkpoint):\n",
        replacement="        if True:\n",
        loses="A later checkpoint that refers to the deleted one cannot be restored.",
        tests=_COMMIT,
    ),
    Mutant(
        name="store/uploads-asked-before-the-listing",
        kind=Kind.SWAPPED_WRITES,
        file=f"{_STORE}tier.py",
        original=(
            "        stored = self.folders(keys.SHARDS)\n"
            "        stored |= self.folders(keys.REFERENCES)\n"
            "        judged = judge()\n"
        ),
        replacement=(
            "        judged = judge()\n"
            "        stored = self.folders(keys.SHARDS)\n"
            "        stored |= self.folders(keys.REFERENCES)\n"
        ),
        loses="A sweep deletes the objects of an upload that began during its listing.",
        tests=_COMMIT,
    ),
    Mutant(
        name="store/young-objects-are-swept",
        kind=Kind.COMPARISON,
        file=f"{_STORE}tier.py",
        original="return all(item.age >= quiet for item in self.list(below))",
        replacement="return any(item.age >= quiet for item in self.list(below))",
        loses="A sweep deletes the objects that a coordinator without a record has just uploaded.",
        tests=_COMMIT,
    ),
    Mutant(
        name="store/commit-without-its-base",
        kind=Kind.MISSING_CHECK,
        file=f"{_STORE}commit.py",
        original=(
            "        if not kept and not _exists(tier, namespace, job_uid, checkpoint):\n"
            "            return False\n"
        ),
        replacement="",
        loses="A checkpoint is committed that refers to objects which are being deleted.",
        tests=_COMMIT,
    ),
    Mutant(
        name="store/references-after-the-look",
        kind=Kind.SWAPPED_WRITES,
        file=f"{_STORE}commit.py",
        original=(
            "        tier.put_references(namespace, job_uid, checkpoint, needs)\n"
            "        kept = all(_exists(tier, namespace, job_uid, base) for base in bases)\n"
        ),
        replacement=(
            "        kept = all(_exists(tier, namespace, job_uid, base) for base in bases)\n"
            "        tier.put_references(namespace, job_uid, checkpoint, needs)\n"
        ),
        loses="A base that is deleted between the two takes the chunks of the new checkpoint with it.",
        tests=_COMMIT,
    ),
    Mutant(
        name="store/running-uploads-are-dead",
        kind=Kind.MISSING_CHECK,
        file=f"{_STORE}rules.py",
        original="        and c not in uploading\n",
        replacement="",
        loses="A sweep deletes the objects of the checkpoint that is being uploaded.",
        tests=_PRUNE,
    ),
    Mutant(
        name="store/this-rounds-checkpoints-are-dead",
        kind=Kind.COMPARISON,
        file=f"{_STORE}rules.py",
        original="(c.round < round_ or",
        replacement="(c.round <= round_ or",
        loses="A sweep deletes an upload that began after its look at the round.",
        tests=_PRUNE,
    ),
    Mutant(
        name="store/the-newest-round-is-abandoned",
        kind=Kind.COMPARISON,
        file=f"{_STORE}rules.py",
        original="(newest is not None and c.round < newest)",
        replacement="(newest is not None and c.round <= newest)",
        loses="The sweep of a whole store deletes what another process is uploading.",
        tests=_USAGE,
    ),
    Mutant(
        name="store/a-running-job-is-swept-without-its-coordinator",
        kind=Kind.MISSING_CHECK,
        file=f"{_STORE}usage.py",
        original=" < grace or name.job_uid in running:",
        replacement=" < grace:",
        loses="The sweep of a whole store takes the place of a coordinator that is uploading.",
        tests=_USAGE,
    ),
    Mutant(
        name="store/other-bytes-are-replaced",
        kind=Kind.MISSING_CHECK,
        file=f"{_STORE}tier.py",
        original=(
            "                if not is_damaged(self._store, key, self._workers, ref):\n"
            "                    raise\n"
        ),
        replacement="",
        loses="A good shard in the store is overwritten by one with the same key.",
        tests=_CONFLICTS,
    ),
    Mutant(
        name="store/object-without-fsync",
        kind=Kind.DROPPED_FSYNC,
        file=f"{_STORE}directory.py",
        original="the next one is made\n    os.fsync(fd)\n",
        replacement="the next one is made\n",
        loses="A power cut leaves empty objects in a store on a shared file system.",
        tests=_DURABLE,
    ),
    Mutant(
        name="store/object-whose-name-is-not-durable",
        kind=Kind.DROPPED_FSYNC,
        file="core/src/holdfast_core/node/files.py",
        original="        self.path.unlink()\n        fsync_directory(self._directory)\n",
        replacement="        self.path.unlink()\n",
        loses="A power cut removes a checkpoint from the store that was reported as persisted.",
        tests=_DURABLE,
    ),
    Mutant(
        name="store/existing-object-is-not-durable",
        kind=Kind.DROPPED_FSYNC,
        file=f"{_STORE}directory.py",
        original=(
            "        self._directories.ensure(path.parent)\n"
            "        fsync_directory(path.parent)\n"
            "        return True"
        ),
        replacement="        return True",
        loses="A power cut removes an object that an upload relied on, because a killed process wrote it.",
        tests=_DURABLE,
    ),
    Mutant(
        name="store/no-read-back",
        kind=Kind.MISSING_DIGEST,
        file=f"{_STORE}directory.py",
        original="if _read_back(temp.path) != written:",
        replacement="if _read_back(temp.path).size_bytes != written.size_bytes:",
        loses="A file system that stores wrong bytes is trusted with the only copy.",
        tests=(
            f"{_TESTS}test_store_directory.py::test_a_damaged_upload_is_refused_and_a_good_one_accepted_afterwards",
        ),
    ),
    Mutant(
        name="store/same-length-is-the-same-object",
        kind=Kind.MISSING_DIGEST,
        file=f"{_STORE}directory.py",
        original="same = expected is not None and size == expected.size_bytes and _info(path) == expected",
        replacement="same = expected is not None and size == expected.size_bytes",
        loses="A damaged object in the store is taken for the upload, and never replaced.",
        tests=(
            f"{_TESTS}test_store_directory.py::test_a_shard_that_was_damaged_in_the_store_is_replaced",
        ),
    ),
    Mutant(
        name="store/short-object",
        kind=Kind.IGNORED_EXCEPTION,
        file=f"{_STORE}directory.py",
        original=(
            '            raise CutError(f"{path}: ends at byte {start + filled}, '
            'expected {start + len(buffer)}")\n'
        ),
        replacement="            pass\n",
        loses="A truncated object is read as if zeros followed it.",
        tests=(
            f"{_TESTS}test_object_stores.py::TestObjectStores::test_a_range_beyond_the_end_is_refused",
        ),
    ),
    Mutant(
        name="store/young-temporary-files-are-removed",
        kind=Kind.COMPARISON,
        file=f"{_STORE}directory.py",
        original="if file.age >= older_than:",
        replacement="if file.age <= older_than:",
        loses="The file that another process is writing disappears.",
        tests=(
            f"{_TESTS}test_store_directory.py::test_only_old_files_of_interrupted_writes_are_removed",
        ),
    ),
    Mutant(
        name="store/refusals-are-retried",
        kind=Kind.MISSING_CHECK,
        file=f"{_STORE}s3/errors.py",
        original="                if not error.retryable:\n                    raise\n",
        replacement="",
        loses="A wrong password is tried for two minutes before the user sees it.",
        tests=_RETRY,
    ),
    Mutant(
        name="store/one-attempt-too-few",
        kind=Kind.OFF_BY_ONE,
        file=f"{_STORE}s3/errors.py",
        original="or attempt >= self.policy.max_attempts",
        replacement="or attempt > self.policy.max_attempts",
        loses="An operation is tried more often than its policy says.",
        tests=_RETRY,
    ),
    Mutant(
        name="store/too-many-parts",
        kind=Kind.CHANGED_CONSTANT,
        file=f"{_STORE}s3/upload.py",
        original="MAX_PARTS = 10_000",
        replacement="MAX_PARTS = 10_002",
        loses="The store refuses an upload of a very large shard after hours.",
        tests=_PARTS,
    ),
)
