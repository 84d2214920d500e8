"""The `kubectl holdfast` plug-in: shows jobs and checkpoints, and requests saves."""
