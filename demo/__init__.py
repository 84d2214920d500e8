"""`make demo` and `make demo-kind`: one training run with four failures and a bit-identical result.

The sequence of failures and checks, called the story, is in story.py. cluster.py and local.py each
implement a stage on which it runs.
"""
