"""Helpers for tests of the operator: builders, an in-memory cluster with fake sidecars, and an oracle.

The operator itself never imports this package.
"""
