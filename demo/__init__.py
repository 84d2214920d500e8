"""`make demo` and `make demo-local`: one training run, four failures, the same bits in the end.

The story (story.py) is told once; cluster.py and local.py each bring the stage it plays on.
"""
