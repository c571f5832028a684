"""The computation of a step: losses by name, the columns that they read, and the forward passes that supply those."""
