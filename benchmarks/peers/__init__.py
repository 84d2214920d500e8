"""The libraries that Holdfast is compared with.

They run in the environment of this folder's own lock. No module here imports Holdfast, and the product does
not depend on any of them.
"""
