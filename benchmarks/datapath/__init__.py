"""Section A of the targets: the data path compared with this machine's limits and with other libraries.

Every participant runs in a separate process (`visit`), and participants alternate, so that background load
affects all of them alike. `ours` is the only module that calls Holdfast. The code for the other libraries
is in `benchmarks.peers`, which has its own environment.
"""
