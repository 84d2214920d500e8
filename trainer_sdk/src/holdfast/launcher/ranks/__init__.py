"""The rank processes of one launcher: the fork server that starts them, their output, and their ends."""
