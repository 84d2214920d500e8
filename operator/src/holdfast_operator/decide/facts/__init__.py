"""Facts that several rules need: which steps can be read, which nodes and pods there are, and how many."""
