"""The training loop of both phases, with its device, optimizers, checkpoints and measures."""
