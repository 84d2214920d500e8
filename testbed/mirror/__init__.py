"""A simulated machine whose Docker engine can pull images, for hosts that reach no registry.

It is a network namespace with a registry and a second engine. The registry serves stand-ins for images of
Docker Hub that are built here, so that registry mode runs as on a user's machine: the test bed gets only
environment variables (see `environment` in `__main__`). CI does not run it.
"""
