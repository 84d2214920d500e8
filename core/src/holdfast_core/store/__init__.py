"""The object tier: checkpoints of jobs in an S3-compatible store, or in a directory that serves
as one.
"""
