"""The operations: each module has the public function and the torch operator that torch.compile sees in its place."""
