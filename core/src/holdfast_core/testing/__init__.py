"""Helpers for tests of every member: builders, failpoints, contract suites, certificates.

Production code never imports from here.
"""
