"""This pod's part of the gang: its launcher and ranks, the restore barrier, and reports to the
coordinator.
"""
