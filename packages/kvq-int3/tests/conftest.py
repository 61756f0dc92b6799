"""Kernels run in Triton's interpreter unless there is a GPU. This must be decided before anything imports triton."""

from kvq_core.testing.places import choose_interpreter

choose_interpreter()
