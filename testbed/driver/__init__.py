"""Drivers of jobs on the test bed's cluster, which the demo, the e2e tests and the benchmarks share."""
