"""What at least two parts of Holdfast share: ids, errors, API models, formats, tiers, transfer.

Needs neither torch nor Kubernetes.
"""
