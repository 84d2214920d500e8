"""Validation rules of the CRDs in CEL, and the texts of quantities and durations that some of them check."""
