"""Adapters to training frameworks. Each module needs its framework; the rest of the SDK imports none."""
