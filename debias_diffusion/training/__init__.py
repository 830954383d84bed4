"""Training: configuration, order of samples, one exact step, checkpoints, the loop."""
