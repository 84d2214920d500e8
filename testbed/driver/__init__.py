"""Drives jobs on the test bed's cluster: what `make demo`, the e2e tests and the benchmarks share."""
