"""Programs that measure; each starts the training scripts as processes."""
