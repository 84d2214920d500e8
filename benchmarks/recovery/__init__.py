"""Recoveries on the test bed's cluster: their times, what they lose, and a plain Job beside them."""
