"""Pure builders of the objects of a job, as plain dicts: the same input gives the same bytes.

They import only model and core, and use no client, no clock and no environment.
"""
