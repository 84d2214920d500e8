"""What only some jobs use: a queue of Kueue, spare pods, and edits of the spec of a gang that runs."""
