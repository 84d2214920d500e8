"""Spare pods: which of them are ready, which worker each of them becomes, and their creates and deletes."""
