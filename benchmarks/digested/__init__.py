"""What `digests.py` covers: a module for each form of a cache."""
