"""The project's test bed: a kind cluster with MinIO and the project's images, on any Linux machine.

On a machine whose Docker engine can pull images, the cluster is plain kind. On others, everything is built
from pinned Go modules and Debian packages (README.md). This package is not shipped to users of Holdfast.
"""
