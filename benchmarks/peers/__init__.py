"""What Holdfast is measured against. Runs in the environment of this folder's own lock, so no module
here imports Holdfast, and no product depends on a peer."""
