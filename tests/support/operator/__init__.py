"""Helpers for tests of the operator: builders, an in-memory cluster with toy sidecars, an oracle.

Never imported by the operator itself.
"""
