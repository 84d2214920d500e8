"""Helpers for tests of the operator: builders, an in-memory cluster with toy sidecars, and an oracle.

The operator itself never imports this package.
"""
