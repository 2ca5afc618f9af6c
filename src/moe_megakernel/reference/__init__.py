"""The reference backend: the layer in plain PyTorch, one file per stage. The definition of right."""
