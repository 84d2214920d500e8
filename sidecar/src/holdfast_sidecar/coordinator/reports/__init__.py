"""What members report of their ranks: combined, and searched for gangs that hang."""
