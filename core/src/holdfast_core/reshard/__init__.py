"""Conversion of a checkpoint of N ranks to payloads of M ranks (ADR 0021).

The package works on layouts and byte ranges, and is independent of slots, sockets and tensors. It is
pure: `reading` executes its plans.
"""
