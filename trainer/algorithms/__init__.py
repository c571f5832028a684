"""What a step makes of its tokens: losses by name, the numbers they read, and the passes that give those."""
