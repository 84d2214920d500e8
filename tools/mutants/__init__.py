"""Seed mistakes into the code that ships, and show that the tests find each of them.

A mutant is one small change of one file: a comparison, a missing fsync, two writes in the wrong order. The
tests named for it must fail. `python -m tools.mutants` seeds a fixed list of mutants, so that a test that is
deleted or weakened by accident shows as a mutant that survives. `of_*.py` hold the list, by package.
"""
