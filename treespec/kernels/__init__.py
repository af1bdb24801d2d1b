"""Kernels in C for a CPU, and what they need of the machine: they know tensors, and no model."""
