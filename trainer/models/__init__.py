"""The parts of Megatron's GPTModel that are ours: attention over shared rows, norms, routed experts."""
