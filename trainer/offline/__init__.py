"""What learns or reads weights beside no loop: `turnlog export`, `turnlog sft`."""
