"""Quality: what a method loses. One measurement a file: perplexity, passkey retrieval, tasks of lm-eval."""
