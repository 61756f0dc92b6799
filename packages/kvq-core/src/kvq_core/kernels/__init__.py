"""The vocabulary of the kernels, one idea a file. Importing this package imports Triton; nothing outside imports it before a launch."""
