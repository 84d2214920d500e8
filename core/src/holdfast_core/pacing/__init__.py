"""Speed control: a limit on background bytes, the gate for foreground copies, and the minimum
rate of a peer.
"""
