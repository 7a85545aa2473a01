"""What the operations need of torch and CUDA: devices, loaded kernels, scales, memory, and tensors as arguments."""
