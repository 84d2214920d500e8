"""LIST and WATCH the objects of the cluster, and keep parsed records of them."""
