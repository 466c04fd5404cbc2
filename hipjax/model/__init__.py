"""The network: configuration, layers, memory, checkpoints."""
