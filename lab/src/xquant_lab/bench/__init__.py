"""Speed: how long decoding takes, beside the uncompressed cache and what the machine can do."""
