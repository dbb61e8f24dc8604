"""Functions of tensors: no parameters, no state."""
