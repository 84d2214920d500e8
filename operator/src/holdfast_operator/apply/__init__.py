"""Carry a decision out: calls on the Kubernetes API and on sidecars, and the status of the job."""
