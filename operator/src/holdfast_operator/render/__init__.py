"""Pure builders of the objects that a job owns: plain dicts, the same input gives the same bytes.

May import model and core; knows no client, no clock and no environment.
"""
