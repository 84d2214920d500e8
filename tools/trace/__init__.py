"""The files and functions of Holdfast that run in four walks, as docs/walks.md: `python -m tools.trace`.

A walk is what a user would call one thing: a save in a pod, a save in a folder, the start of a job, the
recovery of a lost pod. Each walk runs real processes. A profile function in each of them
(site/sitecustomize.py) writes down each function of this repository when it runs for the first time.
"""
