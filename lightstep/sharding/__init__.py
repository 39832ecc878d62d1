"""What preparing a model means: placement, units, gates in front of forwards and gathering, reduced gradients."""
