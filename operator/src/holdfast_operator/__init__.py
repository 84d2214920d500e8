"""The Holdfast operator: keeps TrainingJobs alive by rounds, restore points and bare pods.

kopf only delivers hints (loop.handlers); the reflectors (watch) are the source of truth. `decide` is pure,
and `apply` carries out its actions. The operator never handles tensor bytes and holds no keys of an object
store.
"""
