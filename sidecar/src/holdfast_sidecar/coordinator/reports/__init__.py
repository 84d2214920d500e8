"""What members report of their ranks: combined, and searched for hangs and stragglers."""
