"""C kernels for a CPU, with compiler flags, memory pages and threads. They take tensors and know no model."""
