"""Ports and logs that bound what strangers can use of them, and mutual TLS."""
