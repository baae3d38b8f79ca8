"""A cache as a file: `writing` writes it, `reading` reads it, and `header` is what it says of itself."""
