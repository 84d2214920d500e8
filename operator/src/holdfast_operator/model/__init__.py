"""The operator's view of one job, the actions of a decision, and the labels, keys and reasons of both.

Values and protocols only.
"""
