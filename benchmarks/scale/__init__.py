"""One operator for a whole cluster of jobs: a real API server, and nodes, pods and sidecars that are played.

The operator runs as a process with the rights and the environment that the chart gives it. etcd and
kube-apiserver are real. No kubelet runs: the benchmark binds the pods, reports their states, renews the
leases of their nodes, and answers for all sidecars over mutual TLS.
"""
