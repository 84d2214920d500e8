"""Shared memory between a rank and its sidecar: slot files, their header, and files that an
untrusted process may change.
"""
