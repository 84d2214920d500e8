"""Section A of the targets: the data path against this machine's limits and against its peers.

Every participant runs in a process of its own (`visit`), in turns, so that all of them meet the same
noise. `ours` is the only module that calls Holdfast; what is measured of others is in
`benchmarks.peers`, which has an environment of its own.
"""
