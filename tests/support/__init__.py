"""Doubles, servers, builders and oracles for tests, the demo and the benchmarks. The product
never imports from here.
"""
