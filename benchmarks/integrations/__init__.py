"""The adapters of holdfast.integrations: kills, identical bits, and how long a save blocks training."""
