"""`holdfast run`: starts the rank processes of a pod and restarts them in place.

It consists of two processes. The launcher handles sockets, signals and asyncio, and never imports torch.
The fork server has imported torch, has one thread, and only forks and reaps: a fork after a thread pool
has started would leave the child with locks that are never released.
"""
