"""Recoveries on the test bed's cluster: their times, what they lose, and those of what people have today."""
