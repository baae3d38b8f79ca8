"""Quality: what a method loses, one task a file; rows of results as JSON."""
