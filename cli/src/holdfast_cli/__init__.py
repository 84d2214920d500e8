"""The command line of Holdfast: `kubectl holdfast`, and the verbs of `holdfast` besides `run`."""
