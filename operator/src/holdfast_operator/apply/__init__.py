"""Carry out a decision: calls to the Kubernetes API and to sidecars, and the status of the job."""
