"""What a strategy will cost, told from the model's shape before anything runs."""
