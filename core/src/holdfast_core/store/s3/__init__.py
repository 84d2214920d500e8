"""Signed S3 requests over HTTP/1.1: connections, credentials, errors and retries."""
