"""One save and one restore of a rank: which place serves them, and what became of them."""
