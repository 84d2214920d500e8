"""Mutual TLS, and ports and logs that limit what unauthenticated callers can use."""
