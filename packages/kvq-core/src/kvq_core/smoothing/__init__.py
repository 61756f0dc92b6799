"""Key smoothing: what is taken off keys before they are stored, so that few bits hold them. Exact for the softmax."""
