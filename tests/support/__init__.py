"""What tests share: models, caches, ways to generate, and what stands in for a GPU or another library."""
