"""Gangs whose pods are a group in a queue of Kueue: which group, and when pods leave it (ADR 0012)."""
