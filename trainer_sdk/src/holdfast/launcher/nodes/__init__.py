"""The launchers of a run on several nodes: node 0 leads, the others join it over one TCP connection each.

 1. The launcher of node 0 listens on the port of `--rdzv-endpoint`. The others connect and send Join.
 2. When all nodes have joined, node 0 starts the round's store and sends StartRound. Every launcher forks
    the ranks of its node, in the same round.
 3. When a rank fails, or a connection ends, node 0 sends EndRound. Every launcher kills its ranks and sends
    RoundEnded. The next round begins at 2, if all nodes are there and restarts are left.
 4. When all ranks have returned 0, or no restarts are left, node 0 sends Leave with the exit code of all
    launchers.

The connection is the node's lease: a launcher whose connection to node 0 ends kills its ranks and joins
again. Both ends send something every few seconds and take silence for the end of the connection. Every
message is authenticated with a key from the run's id and token.
"""
