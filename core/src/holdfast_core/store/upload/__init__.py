"""Send one object to the store: its parts, their compression, and what an interrupted upload
left.
"""
