"""What lies on disk and in the store after its save: read again, replaced if damaged, deleted if
no longer needed.
"""
