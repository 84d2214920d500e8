"""Mutants of the node tier: its files, its documents, its scan and its index."""

from __future__ import annotations

from tools.mutants.model import Kind, Mutant

_NODE = "core/src/holdfast_core/node/"
_TESTS = "tests/core/node/"
_FILES = (f"{_TESTS}test_files.py",)
_SHARD = (f"{_TESTS}test_shard_file.py",)
_DELETION = (f"{_TESTS}test_deletion.py",)
_POWER = f"{_TESTS}test_node_every_call.py::test_no_order_of_writes_mixes_the_bytes_of_two_shards"

OF_NODE = (
    Mutant(
        name="node/verify-without-the-payload",
        kind=Kind.MISSING_DIGEST,
        file=f"{_NODE}shard_file.py",
        original="        check_same(record, table, self._trailer)\n",
        replacement="",
        loses="The scrub does not find a payload that the disk has damaged.",
        tests=(f"{_TESTS}test_node_faults.py",),
    ),
    Mutant(
        name="node/verify-without-the-trailer-of-the-disk",
        kind=Kind.MISSING_DIGEST,
        file=f"{_NODE}shard_file.py",
        original="if read_record(self._fd, self._path, self._buffers) != self._trailer:",
        replacement="if False:",
        loses="The scrub does not find a trailer that the disk has lost.",
        tests=_SHARD,
    ),
    Mutant(
        name="node/no-read-back",
        kind=Kind.MISSING_DIGEST,
        file=f"{_NODE}shard_file.py",
        original="if _chunk_crc(fd, header, chunk, buffers) != table.crcs[chunk]:",
        replacement="if _chunk_crc(fd, header, chunk, buffers) not in table.crcs:",
        loses="A disk that wrote a block to the wrong place acknowledges a save that cannot be restored.",
        tests=_SHARD,
    ),
    Mutant(
        name="node/chunk-without-crc",
        kind=Kind.MISSING_DIGEST,
        file=f"{_NODE}shard_file.py",
        original="if got != len(view) or crc32c(view) != self.table.crcs[chunk]:",
        replacement="if got != len(view):",
        loses="A bit that the disk flipped is restored into the model.",
        tests=_SHARD,
    ),
    Mutant(
        name="node/name-of-an-existing-document",
        kind=Kind.DROPPED_FSYNC,
        file=f"{_NODE}documents.py",
        original="        fsync_directory(path.parent)\n    return True",
        replacement="        pass\n    return True",
        loses="A power cut removes a manifest of another process that this one has acknowledged.",
        tests=_FILES,
    ),
    Mutant(
        name="node/damaged-document",
        kind=Kind.MISSING_DIGEST,
        file="core/src/holdfast_core/format/canonical.py",
        original='seal[:1] + seal[-1:] != b"\\n\\n" or digest_of(document) != stored',
        replacement='seal[:1] + seal[-1:] != b"\\n\\n"',
        loses="A manifest that the disk has damaged is used, and names other shards.",
        tests=_FILES,
    ),
    Mutant(
        name="node/layout-that-only-exists",
        kind=Kind.MISSING_DIGEST,
        file=f"{_NODE}tier.py",
        original="            self.get_layout(digest)\n        except (NotFoundError, CorruptionError):\n",
        replacement="            path.lstat()\n        except FileNotFoundError:\n",
        loses="A damaged layout is trusted by all later saves, of which none can be opened.",
        tests=(
            "tests/trainer_sdk/directory/test_damaged_layouts.py::"
            "test_the_next_save_repairs_a_damaged_layout",
        ),
    ),
    Mutant(
        name="node/older-version-of-a-round",
        kind=Kind.COMPARISON,
        file=f"{_NODE}documents.py",
        original="recorded > (round_, version)",
        replacement="recorded[0] > round_",
        loses="A late message brings back an older version of the round, with members that were replaced.",
        tests=_FILES,
    ),
    Mutant(
        name="node/two-writers-of-one-identity",
        kind=Kind.DROPPED_LOCK,
        file=f"{_NODE}tier.py",
        original="with self._write_locks[header.rank % _WRITE_LOCKS]:",
        replacement="with suppress():",
        loses="Two payloads are stored as the same step of a rank, and ranks restore different ones.",
        tests=_SHARD,
    ),
    Mutant(
        name="node/shard-without-fsync",
        kind=Kind.DROPPED_FSYNC,
        file=f"{_NODE}tier.py",
        original="        temp.sync()\n        chunks = to_read_back",
        replacement="        chunks = to_read_back",
        loses="A power cut after a save leaves a shard of zeros under its final name.",
        tests=(
            f"{_TESTS}test_node_faults.py::test_a_failed_fsync_is_never_repeated_on_the_same_file",
        ),
    ),
    Mutant(
        name="node/copy-without-fsync",
        kind=Kind.DROPPED_FSYNC,
        file=f"{_NODE}tier.py",
        original="            temp.sync()\n            with self._lock:",
        replacement="            with self._lock:",
        loses="A step counts as replicated, and the copy is lost with the power of its node.",
        tests=_FILES,
    ),
    Mutant(
        name="node/shards-deleted-before-the-manifest",
        kind=Kind.SWAPPED_WRITES,
        file=f"{_NODE}tier.py",
        original='                sys.audit("holdfast.node.before_tombstone")\n                path.unlink()',
        replacement=(
            "                for entry in self._index.of_checkpoint(job_uid, checkpoint):\n"
            "                    self.delete_shard(ref)\n"
            '                sys.audit("holdfast.node.before_tombstone")\n                path.unlink()'
        ),
        loses="A kill during the deletion leaves a manifest whose shards are gone.",
        tests=_DELETION,
    ),
    Mutant(
        name="node/deletion-of-a-manifest-is-not-durable",
        kind=Kind.DROPPED_FSYNC,
        file=f"{_NODE}tier.py",
        original="                path.unlink()\n                fsync_directory(path.parent)\n",
        replacement="                path.unlink()\n",
        loses="A power cut brings back the manifest of a checkpoint whose shards are gone.",
        tests=_DELETION,
    ),
    Mutant(
        name="node/file-without-fsync",
        kind=Kind.DROPPED_FSYNC,
        file=f"{_NODE}files.py",
        original="            os.fsync(self.fd)\n",
        replacement="",
        loses="A power cut after a save leaves empty files under final names.",
        tests=_FILES,
    ),
    Mutant(
        name="node/renamed-file-without-fsync-of-its-directory",
        kind=Kind.DROPPED_FSYNC,
        file=f"{_NODE}files.py",
        original=(
            '        self.path.rename(final)\n        sys.audit("holdfast.node.after_rename")\n'
            "        fsync_directory(self._directory)\n"
        ),
        replacement='        self.path.rename(final)\n        sys.audit("holdfast.node.after_rename")\n',
        loses="A power cut removes a shard that was acknowledged.",
        tests=_FILES,
    ),
    Mutant(
        name="node/linked-file-without-fsync-of-its-directory",
        kind=Kind.DROPPED_FSYNC,
        file=f"{_NODE}files.py",
        original="        self.path.unlink()\n        fsync_directory(self._directory)\n",
        replacement="        self.path.unlink()\n",
        loses="A power cut removes a manifest that was acknowledged.",
        tests=_FILES,
    ),
    Mutant(
        name="node/new-directory-is-not-durable",
        kind=Kind.DROPPED_FSYNC,
        file=f"{_NODE}files.py",
        original=(
            "                    raise\n"
            "            fsync_directory(path.parent)\n"
            "            self._durable.add(path)"
        ),
        replacement="                    raise\n            self._durable.add(path)",
        loses="A power cut removes the directory of a step with the shards in it.",
        tests=_FILES,
    ),
    Mutant(
        name="node/temporary-file-that-a-scan-removed",
        kind=Kind.MISSING_CHECK,
        file=f"{_NODE}files.py",
        original="if os.fstat(temp.fd).st_nlink == 1:",
        replacement="if os.fstat(temp.fd).st_nlink <= 1:",
        loses="A save fails because a process that started at that moment removed its file.",
        tests=_FILES,
    ),
    Mutant(
        name="node/temporary-file-without-lock",
        kind=Kind.DROPPED_LOCK,
        file=f"{_NODE}files.py",
        original="                fcntl.flock(temp.fd, fcntl.LOCK_EX)\n",
        replacement="",
        loses="A process that starts removes the file into which another one writes.",
        tests=_FILES,
    ),
    Mutant(
        name="node/short-write",
        kind=Kind.OFF_BY_ONE,
        file=f"{_NODE}files.py",
        original="os.pwrite(fd, data[written:], offset + written)",
        replacement="os.pwrite(fd, data[written:], offset)",
        loses="After a short write, the rest of a block overwrites its beginning.",
        tests=_FILES,
    ),
    Mutant(
        name="node/failed-listing-is-empty",
        kind=Kind.IGNORED_EXCEPTION,
        file=f"{_NODE}documents.py",
        original=(
            "    if not isinstance(error, FileNotFoundError | PermissionError):\n"
            "        raise error"
        ),
        replacement="    del error",
        loses="A disk that fails to list its manifests looks empty, and the shards are deleted as orphans.",
        tests=(
            f"{_TESTS}test_node_media.py::test_a_listing_that_fails_is_not_taken_for_an_empty_one",
        ),
    ),
    Mutant(
        name="node/renamed-shard",
        kind=Kind.MISSING_CHECK,
        file=f"{_NODE}documents.py",
        original='if record.header.job_uid != parts[0] or shard_key(record.ref) != "/".join(parts[1:]):',
        replacement="if record.header.job_uid != parts[0]:",
        loses="A shard under the name of another one is restored in its place.",
        tests=(
            f"{_TESTS}test_node_media.py::test_a_shard_that_took_the_place_of_another_is_refused",
        ),
    ),
    Mutant(
        name="node/spare-file-that-is-read",
        kind=Kind.DROPPED_LOCK,
        file=f"{_NODE}volume.py",
        original=(
            "        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
            "        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)\n"
        ),
        replacement="",
        loses="A peer that still reads a deleted shard gets bytes of the next one.",
        tests=(
            f"{_TESTS}test_spare_files.py::test_a_reader_that_is_open_still_reads_the_deleted_shard",
        ),
    ),
    Mutant(
        name="node/spare-file-with-another-name",
        kind=Kind.COMPARISON,
        file=f"{_NODE}volume.py",
        original="if os.fstat(fd).st_nlink != 1:",
        replacement="if os.fstat(fd).st_nlink < 1:",
        loses="A hard link to an old shard, such as that of a backup, shows the bytes of a newer one.",
        tests=(f"{_TESTS}test_spare_files.py::test_a_file_with_a_second_name_is_not_overwritten",),
    ),
    Mutant(
        name="node/overwritten-before-its-deletion-is-durable",
        kind=Kind.DROPPED_FSYNC,
        file=f"{_NODE}volume.py",
        original="        try:\n            fsync_directory(path.parent)\n        except BaseException:",
        replacement="        try:\n            pass\n        except BaseException:",
        loses="A power cut brings back the name of a deleted shard, over the bytes of the next one.",
        tests=(_POWER,),
    ),
    Mutant(
        name="node/room-of-reservations",
        kind=Kind.CHANGED_CONSTANT,
        file=f"{_NODE}volume.py",
        original="return max(0, self.limit_bytes - self._used - self._reserved - self._spare)",
        replacement="return max(0, self.limit_bytes - self._used - self._spare)",
        loses="Two writes at the same time exceed the volume, and Kubernetes evicts the pod.",
        tests=(f"{_TESTS}test_budget.py",),
    ),
)
