"""The `kubectl holdfast` plug-in: what a person wants to know of jobs and checkpoints."""
