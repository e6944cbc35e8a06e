"""Works while transformers loads a checkpoint: packed tensors become Experts4bit."""
