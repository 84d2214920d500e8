"""The Holdfast operator: keeps TrainingJobs alive by rounds, restore points and bare pods.

kopf runs the process (__main__) and watches nothing; the reflectors (watch) are the only watch. `decide` is
pure, and `apply` carries out its actions. The operator never handles tensor bytes and holds no keys of an
object store.
"""
