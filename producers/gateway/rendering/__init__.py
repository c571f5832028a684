"""Chat templates, found in a model's folder and rendered as transformers renders them; `template` does both."""
