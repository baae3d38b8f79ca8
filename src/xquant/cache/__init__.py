"""The caches that users make: one that grows, one of a fixed size, and those for calls that pass none."""
