"""Checkpoints in a directory, without a cluster: what the sidecar does in a pod, over one folder.

`DirectoryService` answers the same messages as a sidecar, so that the SDK has one code path. It runs in
a process of its own (`holdfast.directory.persister`) next to each rank, or in a test (`holdfast.testing`).
"""
