"""Builders for the tests of a release."""
