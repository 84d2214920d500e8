"""`holdfast run`: starts the rank processes of a pod and restarts them in place.

Two processes, so that each can be what it must be. The launcher has sockets, signals and asyncio, and
never imports torch. The fork server has imported torch, has one thread, and does nothing but fork
(a fork after a thread pool came to life hangs the child) and reap.
"""
