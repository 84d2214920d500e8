"""Signed S3 requests over HTTP/1.1, with connections, credentials, errors and retries."""
