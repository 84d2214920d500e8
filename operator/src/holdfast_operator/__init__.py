"""The Holdfast operator: keeps TrainingJobs alive by rounds, restore points and bare pods.

kopf sits at the rim (handlers), reflectors are the truth, `decide` is pure, `apply` is the only
interpreter of its actions. It never sees a tensor byte and holds no key of an object store.
"""
