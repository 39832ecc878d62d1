"""Roles for reinforcement learning: who trains, who generates, and how weights get from one to the other."""
