"""Shared memory between a rank and its sidecar: slot files, and files in a shared volume."""
