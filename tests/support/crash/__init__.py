"""Support for crash tests: kills at every system call, power cuts and failpoints."""
