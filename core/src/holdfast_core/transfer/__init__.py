"""What crosses between processes: typed messages, their strict codec, and the bulk wire."""
