"""What at least two parts of Holdfast share: ids, errors, API models, formats, tiers, messages.

Needs neither torch nor Kubernetes.
"""
