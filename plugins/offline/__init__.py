"""Training and reading of weights outside a loop: `turnlog export`, `turnlog sft`."""
