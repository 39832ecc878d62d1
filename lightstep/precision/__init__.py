"""Numbers: fp32 masters, fp32 gradient accumulation, loss scaling."""
