"""The loop of the operator: keys to work on, observe, decide, apply; kopf and the plain ports
around it.
"""
