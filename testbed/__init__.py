"""The project's own test bed: a kind cluster with MinIO and our images, on any Linux machine.

Where a Docker engine can pull images it is plain kind. Where none can, everything is built from
pinned Go modules and Debian packages (README.md). Nothing here is shipped to users of Holdfast.
"""
