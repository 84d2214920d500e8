"""The contents of a job's status and Events: conditions, phase, times of recoveries. Pure."""
