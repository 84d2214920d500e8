"""What the operator knows about one job and what it may do to it, with the names of both. Values
and protocols only.
"""
