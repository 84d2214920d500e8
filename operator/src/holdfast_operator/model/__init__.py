"""The operator's view of one job, the actions that it may take, and the names of both.

Values and protocols only.
"""
