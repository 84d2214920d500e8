"""Checkpoints in a folder, without a cluster: a service that does the sidecar's work.

`DirectoryService` answers the same messages as a sidecar, so that the SDK has one code path. It runs in
a separate process next to each rank (`holdfast.directory.persister`), or in a test (`holdfast.testing`).
"""
