"""Crash tests: kill a program at every system call, cut the power, and failpoints."""
