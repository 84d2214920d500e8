"""A bulk server and its clients, and a peer that breaks the protocol."""
