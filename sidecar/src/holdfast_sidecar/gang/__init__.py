"""This pod in its gang: launcher and ranks, the restore barrier, reports to the coordinator."""
