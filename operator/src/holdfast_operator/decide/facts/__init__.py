"""Facts that several rules need: which steps can be read, what counts as a failure, and when. Pure."""
