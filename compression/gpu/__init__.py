"""Frames on a GPU, one file of Triton kernels a codec; imported where a tensor is on a GPU."""
