"""Does it work: programs that run the whole system and say what they saw."""
