"""Code that at least two parts of Holdfast share: ids, errors, API models, formats, tiers, messages.

It depends on neither torch nor a Kubernetes client.
"""
