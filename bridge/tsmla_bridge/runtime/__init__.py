"""The operations' access to torch and CUDA: devices, loaded kernels, scales, memory, and tensors as arguments."""
