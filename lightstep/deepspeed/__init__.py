"""Strategy and optimizer over DeepSpeed's engine."""
