"""The operator's view of one job, the actions of a decision, and the objects, labels and reasons of both.

Values, protocols and pure builders only.
"""
