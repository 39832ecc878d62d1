"""The strategy and the optimizer contract over DeepSpeed's engine."""
