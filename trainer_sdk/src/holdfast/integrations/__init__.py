"""Adapters to training frameworks, each imported only by those who use it."""
