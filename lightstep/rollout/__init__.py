"""Reinforcement learning: which ranks train, which generate, and how weights are sent from one to the other."""
