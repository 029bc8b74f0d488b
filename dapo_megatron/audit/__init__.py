"""Whether this cluster, this layout and these kernels give the loss and the gradients that they should."""
