"""Calls to the sidecars of a job: which goes next, how it is authenticated, what it answered."""
