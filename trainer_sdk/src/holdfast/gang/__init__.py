"""Agreement between the ranks of a gang, through a TCPStore of their own."""
