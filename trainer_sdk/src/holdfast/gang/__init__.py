"""What the ranks of a gang agree on, through a TCPStore of their own."""
