"""Benchmarks. Each command writes one JSON file below results/, which must not be edited by hand."""
