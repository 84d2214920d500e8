"""One sidecar process: it opens everything, serves requests and hooks, and moves from round to round."""
