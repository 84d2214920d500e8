"""Benchmarks: one command, one JSON under results/, made by the command and never by hand."""
