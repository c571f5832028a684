"""Where calls run: one module per backend, and what the local ones are made of."""
