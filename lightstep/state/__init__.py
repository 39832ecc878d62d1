"""Where fp32 masters and optimizer state live between steps."""
