"""Our own parts of Megatron's GPTModel: attention over shared rows, norms, routed experts, adapters, vision."""
