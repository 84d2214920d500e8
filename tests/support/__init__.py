"""Test doubles, servers, builders and oracles for tests, the demo and the benchmarks.

Product code never imports from this package.
"""
