PATCH = {'sm90/mla_decode.py': [('self.rescale_bits = 0.0 if config.cluster == 1 else RESCALE_BITS', 'self.rescale_bits = RESCALE_BITS')]}
