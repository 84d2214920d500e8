"""A machine whose Docker engine can pull, for a machine that reaches no registry.

It is a network namespace with a registry and a second engine in it. The registry answers for Docker
Hub with stand-ins that are built here, so that registry mode runs as a user's machine runs it: the
test bed is told nothing but PATH, DOCKER_HOST and the node image's tag. Not part of `make test`.
"""
